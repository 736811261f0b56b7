"""MarginMSE: squared error between the model's and the teacher's margins of the positive over each negative."""

from __future__ import annotations

from torch import Tensor

from tevatron.trainer.program.losses.temperatures import Temperatures


def margin_mse(scores_NG: Tensor, teacher_NG: Tensor | None, temperatures: Temperatures) -> Tensor:
    """Return one loss a group, fp32 of shape [N]: the mean over its negatives, 0 where it has none."""
    assert teacher_NG is not None, "the dataset is checked for teacher scores"
    difference_NG = scores_NG.float() - teacher_NG.float()
    squared_NG = (difference_NG[:, :1] - difference_NG[:, 1:]).square()
    return squared_NG.sum(dim=-1) / max(1, squared_NG.shape[-1])
