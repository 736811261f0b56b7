import math

import pytest
import torch

from tevatron.trainer.program.losses.contrastive import contrastive
from tevatron.trainer.program.losses.temperatures import Temperatures


def test_hand_arithmetic():
    # -log(e^1 / (e^1 + e^0 + e^2)) and -log(e^3 / (e^3 + 2))
    scores = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    expected = [
        math.log(math.e + 1 + math.e**2) - 1,
        math.log(math.e**3 + 2) - 3,
    ]
    assert contrastive(scores, None, Temperatures()).tolist() == pytest.approx(expected, abs=1e-6)


def test_equals_torchs_cross_entropy_with_a_temperature():
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.1]])
    expected = torch.nn.functional.cross_entropy(scores / 0.5, torch.tensor([0]))
    got = contrastive(scores, None, Temperatures(student=0.5))
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)


def test_half_precision_scores_give_fp32():
    assert (
        contrastive(torch.zeros(2, 3, dtype=torch.bfloat16), None, Temperatures()).dtype
        == torch.float32
    )
