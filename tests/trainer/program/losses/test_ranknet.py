import math

import pytest
import torch

from tevatron.trainer.program.losses.ranknet import ranknet
from tevatron.trainer.program.losses.temperatures import Temperatures


def test_hand_arithmetic():
    # The teacher orders 0 > 2 > 1: pairs (0,2), (0,1), (2,1) with score differences -1, 1, 2.
    scores = torch.tensor([[1.0, 0.0, 2.0]])
    teacher = torch.tensor([[5.0, -1.0, 3.0]])
    expected = (math.log1p(math.e) + math.log1p(math.e**-1) + math.log1p(math.e**-2)) / 3
    assert ranknet(scores, teacher, Temperatures()).item() == pytest.approx(expected, abs=1e-6)


def test_equals_torchs_logistic_loss_over_the_ordered_pairs():
    scores = torch.tensor([0.3, -1.0, 2.0, 0.7])
    teacher = torch.tensor([4.0, 1.0, -2.0, 1.0])
    pairs = [(i, j) for i in range(4) for j in range(4) if teacher[i] > teacher[j]]
    differences = torch.stack([scores[i] - scores[j] for i, j in pairs])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        differences, torch.ones(len(pairs))
    )
    got = ranknet(scores[None], teacher[None], Temperatures())
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)


def test_ties_cost_nothing():
    assert ranknet(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2), Temperatures()).item() == 0.0
