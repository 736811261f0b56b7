"""Contrastive loss: cross entropy of the group's scores with the positive, index 0, as the label."""

from __future__ import annotations

from torch import Tensor

from tevatron.trainer.program.losses.temperatures import Temperatures


def contrastive(scores_NG: Tensor, teacher_NG: Tensor | None, temperatures: Temperatures) -> Tensor:
    """Return one loss a group, fp32 of shape [N]; the teacher's scores are not looked at."""
    return -(scores_NG.float() / temperatures.student).log_softmax(dim=-1)[:, 0]
