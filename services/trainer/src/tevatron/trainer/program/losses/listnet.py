"""ListNet: cross entropy between the teacher's and the model's top-one probabilities over a group."""

from __future__ import annotations

from torch import Tensor

from tevatron.trainer.program.losses.temperatures import Temperatures


def listnet(scores_NG: Tensor, teacher_NG: Tensor | None, temperatures: Temperatures) -> Tensor:
    """Return one loss a group, fp32 of shape [N]; teacher_NG: raw scores of shape [N, G]."""
    assert teacher_NG is not None, "the dataset is checked for teacher scores"
    p_NG = (teacher_NG.float() / temperatures.teacher).softmax(dim=-1)
    log_q_NG = (scores_NG.float() / temperatures.student).log_softmax(dim=-1)
    return -(p_NG * log_q_NG).sum(dim=-1)
