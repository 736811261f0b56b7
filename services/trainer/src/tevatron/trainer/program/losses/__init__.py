"""The training losses, each a pure function of one file: scores in, one loss a group out.

A new one is a file with its function, a line in `LOSSES`, and its name in `contracts.train.LossName`. Shapes: N groups
(queries), G passages a group; the positive is at index 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tevatron.core.contracts.train import LossName
from tevatron.core.errors import ConfigError, unknown_name
from tevatron.trainer.program.losses.contrastive import contrastive
from tevatron.trainer.program.losses.listnet import listnet
from tevatron.trainer.program.losses.listwise_kl import listwise_kl
from tevatron.trainer.program.losses.margin_mse import margin_mse
from tevatron.trainer.program.losses.ranknet import ranknet
from tevatron.trainer.program.losses.temperatures import Temperatures


class Loss(NamedTuple):
    """A loss, and whether its rows must carry a teacher's scores."""

    function: Callable[[Tensor, Tensor | None, Temperatures], Tensor]
    """(scores_NG, teacher_NG, temperatures) -> fp32 losses of shape [N]."""
    needs_teacher: bool


LOSSES: dict[LossName, Loss] = {
    LossName.CONTRASTIVE: Loss(contrastive, needs_teacher=False),
    LossName.LISTNET: Loss(listnet, needs_teacher=True),
    LossName.LISTWISE_KL: Loss(listwise_kl, needs_teacher=True),
    LossName.MARGIN_MSE: Loss(margin_mse, needs_teacher=True),
    LossName.RANKNET: Loss(ranknet, needs_teacher=True),
}


def get_loss(name: str) -> Loss:
    """Return the loss of that name; an unknown one is a `ConfigError` that lists them."""
    for known, loss in LOSSES.items():
        if str(known) == str(name):
            return loss
    raise ConfigError(unknown_name("loss", name, [str(known) for known in LOSSES]))


__all__ = ["LOSSES", "Loss", "Temperatures", "get_loss"]
