"""Each error has its reason code."""

import pytest
import torch

from tevatron.core.contracts.jobs import FailReason
from tevatron.core.errors import (
    ConfigError,
    ContractError,
    EmptyPromptError,
    FormatError,
    JobError,
    QueryTooLongError,
)
from tevatron.trainer.program.failures import NotFiniteError, failing_as, reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FormatError("bad", path="x.jsonl", line=17), "data_error"),
        (QueryTooLongError("long"), "data_error"),
        (EmptyPromptError("no tokens"), "data_error"),
        (ContractError("differs"), "contract_mismatch"),
        (ConfigError("flag"), "config_error"),
        (NotFiniteError("nan"), "not_finite"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("shape mismatch"), "program_failed"),
        (JobError("x", reason="model_error"), "model_error"),
    ],
)
def test_reasons(error, reason):
    assert reason_of(error) == FailReason(reason)


def test_a_users_mistake_within_a_block_takes_its_reason():
    with (
        pytest.raises(JobError, match="no tokenizer") as caught,
        failing_as(FailReason.MODEL_ERROR),
    ):
        raise ConfigError("no tokenizer")
    assert caught.value.reason == "model_error"
    with pytest.raises(ZeroDivisionError), failing_as(FailReason.MODEL_ERROR):
        raise ZeroDivisionError
