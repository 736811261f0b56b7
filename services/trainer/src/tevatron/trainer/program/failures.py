"""Why a run failed, as the reason code that a job carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tevatron.core.contracts.jobs import FailReason
from tevatron.core.errors import (
    ConfigError,
    ContractError,
    FormatError,
    InputError,
    JobError,
    PairError,
    TevatronError,
)


class NotFiniteError(TevatronError):
    """The loss, the gradient or a score is NaN or infinite."""


_OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def reason_of(error: BaseException) -> FailReason:
    """Return the reason code of an exception."""
    if isinstance(error, JobError):
        return FailReason(error.reason)
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if any(words in str(error).lower() for words in _OUT_OF_MEMORY_WORDS):
        return FailReason.OUT_OF_MEMORY
    return FailReason.PROGRAM_FAILED


_REASONS: tuple[tuple[type[BaseException], FailReason], ...] = (
    (NotFiniteError, FailReason.NOT_FINITE),
    (ContractError, FailReason.CONTRACT_MISMATCH),
    (FormatError, FailReason.DATA_ERROR),
    (PairError, FailReason.DATA_ERROR),
    (ConfigError, FailReason.CONFIG_ERROR),
    (InputError, FailReason.CONFIG_ERROR),
    (MemoryError, FailReason.OUT_OF_MEMORY),
    (torch.OutOfMemoryError, FailReason.OUT_OF_MEMORY),
)


@contextmanager
def failing_as(reason: FailReason) -> Iterator[None]:
    """Give the user's mistakes found within the block this reason."""
    try:
        yield
    except InputError as error:
        raise JobError(str(error), reason=reason.value) from error
