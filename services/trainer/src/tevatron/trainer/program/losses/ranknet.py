"""RankNet: logistic loss on every pair of a group that the teacher puts in an order."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tevatron.trainer.program.losses.temperatures import Temperatures


def ranknet(scores_NG: Tensor, teacher_NG: Tensor | None, temperatures: Temperatures) -> Tensor:
    """Return one loss a group, fp32 of shape [N]: the mean over its ordered pairs, 0 where all are tied."""
    assert teacher_NG is not None, "the dataset is checked for teacher scores"
    scores_NG, teacher_NG = scores_NG.float(), teacher_NG.float()
    ordered_NGG = (teacher_NG[:, :, None] > teacher_NG[:, None, :]).float()
    losses_NGG = F.softplus(scores_NG[:, None, :] - scores_NG[:, :, None])
    return (losses_NGG * ordered_NGG).sum(dim=(1, 2)) / ordered_NGG.sum(dim=(1, 2)).clamp(min=1)
