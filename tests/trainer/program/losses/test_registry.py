"""Adding a loss takes a file with its function and one line in the registry."""

import pytest
import torch

from tevatron.core.contracts.train import LossName
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.losses import LOSSES, Loss, Temperatures, get_loss


@pytest.mark.parametrize("name", list(LossName))
def test_every_loss_gives_one_finite_number_a_group_and_a_gradient(name):
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    losses = get_loss(name).function(scores, teacher, Temperatures())
    assert losses.shape == (2,)
    assert losses.dtype == torch.float32
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", list(LossName))
def test_groups_do_not_reach_into_one_another(name):
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])
    teacher = torch.tensor([[3.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    loss = get_loss(name).function
    together = loss(scores, teacher, Temperatures(2.0, 3.0))
    apart = [
        loss(scores[i : i + 1], teacher[i : i + 1], Temperatures(2.0, 3.0)).item() for i in (0, 1)
    ]
    assert together.tolist() == pytest.approx(apart, abs=1e-6)


def test_an_unknown_loss_names_those_that_are_there():
    with pytest.raises(
        ConfigError, match=r"listwise_kl, margin_mse, ranknet.*Did you mean 'ranknet'"
    ):
        get_loss("rank_net")


def test_a_new_loss_is_a_function_and_a_line(monkeypatch):
    def hinge(scores_NG, teacher_NG, temperatures):
        return (1 - scores_NG[:, :1] + scores_NG[:, 1:]).clamp(min=0).mean(dim=-1)

    monkeypatch.setitem(LOSSES, "hinge", Loss(hinge, needs_teacher=False))
    loss = get_loss("hinge")
    assert loss.function(torch.tensor([[2.0, 1.5, 0.0]]), None, Temperatures()).tolist() == [0.25]
