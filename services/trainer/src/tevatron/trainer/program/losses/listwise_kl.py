"""Listwise distillation: KL(teacher || model) of the two softmaxes over a group, times the student's temperature squared.

The square keeps the gradient's size as the temperature grows; the teacher's temperature does not enter it, as in the
reference.
"""

from __future__ import annotations

from torch import Tensor

from tevatron.trainer.program.losses.temperatures import Temperatures


def listwise_kl(scores_NG: Tensor, teacher_NG: Tensor | None, temperatures: Temperatures) -> Tensor:
    """Return one loss a group, fp32 of shape [N]; teacher_NG: raw scores of shape [N, G]."""
    assert teacher_NG is not None, "the dataset is checked for teacher scores"
    log_p_NG = (teacher_NG.float() / temperatures.teacher).log_softmax(dim=-1)
    log_q_NG = (scores_NG.float() / temperatures.student).log_softmax(dim=-1)
    return (log_p_NG.exp() * (log_p_NG - log_q_NG)).sum(dim=-1) * temperatures.student**2
