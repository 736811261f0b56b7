import pytest
import torch

from tevatron.trainer.program.losses.margin_mse import margin_mse
from tevatron.trainer.program.losses.temperatures import Temperatures


def test_hand_arithmetic():
    # Margins of the model 1 and 3, of the teacher 2 and 6: ((1-2)^2 + (3-6)^2) / 2.
    scores = torch.tensor([[2.0, 1.0, -1.0]])
    teacher = torch.tensor([[10.0, 8.0, 4.0]])
    assert margin_mse(scores, teacher, Temperatures()).item() == pytest.approx(5.0)


def test_equals_torchs_mse_of_the_margins():
    scores = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, 0.5]])
    teacher = torch.tensor([[4.0, 1.0, -2.0], [0.0, 0.0, 3.0]])
    expected = torch.nn.functional.mse_loss(
        scores[:, :1] - scores[:, 1:], teacher[:, :1] - teacher[:, 1:]
    )
    assert margin_mse(scores, teacher, Temperatures()).mean().item() == pytest.approx(
        expected.item()
    )


def test_a_group_without_negatives_costs_nothing():
    assert margin_mse(torch.ones(2, 1), torch.zeros(2, 1), Temperatures()).tolist() == [0.0, 0.0]
