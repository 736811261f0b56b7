import math

import pytest
import torch

from tevatron.trainer.program.losses.listwise_kl import listwise_kl
from tevatron.trainer.program.losses.temperatures import Temperatures


def test_hand_arithmetic():
    # Teacher (3/4, 1/4), model (1/2, 1/2).
    teacher = torch.tensor([[math.log(3.0), 0.0]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    got = listwise_kl(torch.zeros(1, 2), teacher, Temperatures())
    assert got.item() == pytest.approx(expected, abs=1e-6)


def test_equals_torchs_kl_div_times_the_students_temperature_squared():
    scores = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, 0.5]])
    teacher = torch.tensor([[4.0, 1.0, -2.0], [0.0, 0.0, 3.0]])
    expected = torch.nn.functional.kl_div(
        (scores / 3.0).log_softmax(-1), (teacher / 2.0).softmax(-1), reduction="batchmean"
    )
    got = listwise_kl(scores, teacher, Temperatures(student=3.0, teacher=2.0)).mean()
    assert got.item() == pytest.approx(expected.item() * 9.0, abs=1e-5)


def test_equal_scores_cost_nothing():
    scores = torch.tensor([[1.0, -2.0, 0.5]])
    assert listwise_kl(scores, scores + 7.0, Temperatures()).item() == pytest.approx(0.0, abs=1e-6)
