"""The one tree of errors, with the HTTP status and the stable code of each.

TevatronError                      500 internal_error
├── InputError                     422 invalid_input      the user's mistake, found at a border
│   ├── FormatError                422 invalid_format     a data file: names file, line and field
│   ├── ConfigError                422 invalid_config     a flag, a job spec, a layout
│   ├── PromptError                422 invalid_prompt     template, prefix or answer tokens
│   │   └── QueryTooLongError      422 query_too_long     the query alone fills the prompt
│   └── ContractError              422 contract_mismatch  a checkpoint is not what its contract says
├── UnauthorizedError              401 unauthorized
├── ForbiddenError                 403 forbidden
├── NotFoundError                  404 not_found
├── ConflictError                  409 conflict
├── TooLargeError                  413 too_large
├── BusyError                      429 busy               try again later (retry_after_s)
├── UnavailableError               503 unavailable        a part that is needed does not answer
└── JobError                       500 job_failed         ends a job with a reason (see contracts.jobs)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class TevatronError(Exception):
    """Root of all errors raised on purpose."""

    status_code: int = 500
    code: str = "internal_error"


class InputError(TevatronError):
    """Something that a user gave cannot be right."""

    status_code = 422
    code = "invalid_input"


class FormatError(InputError):
    """A data file is broken; the message names file, line and field."""

    code = "invalid_format"

    def __init__(
        self, message: str, *, path: Path | str, line: int | None = None, field: str | None = None
    ) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        where = f"{place}: field '{field}'" if field else place
        super().__init__(f"{where}: {message}")
        self.path = str(path)
        self.line = line
        self.field = field


class ConfigError(InputError):
    """A flag, a job spec or a layout cannot be honoured."""

    code = "invalid_config"


class PromptError(InputError):
    """A template cannot be rendered with this tokenizer or these prefixes."""

    code = "invalid_prompt"


class PairError(PromptError):
    """A pair that no prompt can be made of; others can."""


class EmptyPromptError(PairError):
    """The pair and the prefixes hold nothing that the tokenizer makes a token of."""

    code = "empty_prompt"


class QueryTooLongError(PairError):
    """The query alone leaves no room for a passage."""

    code = "query_too_long"


class ContractError(InputError):
    """A checkpoint does not reproduce its contract."""

    code = "contract_mismatch"


class UnauthorizedError(TevatronError):
    """No API key, or one that is not known."""

    status_code = 401
    code = "unauthorized"


class ForbiddenError(TevatronError):
    """The key may not do this."""

    status_code = 403
    code = "forbidden"


class NotFoundError(TevatronError):
    """No such thing, or not this key's."""

    status_code = 404
    code = "not_found"


class ConflictError(TevatronError):
    """The thing is not in a state that allows this."""

    status_code = 409
    code = "conflict"


class TooLargeError(TevatronError):
    """A body or a batch is over its limit."""

    status_code = 413
    code = "too_large"


class BusyError(TevatronError):
    """A queue is full; try again later."""

    status_code = 429
    code = "busy"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(TevatronError):
    """A part that is needed does not answer."""

    status_code = 503
    code = "unavailable"


class JobError(TevatronError):
    """Ends a job as failed, with a reason code and the phase in which it happened."""

    code = "job_failed"

    def __init__(self, message: str, *, reason: str, phase: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.phase = phase


MAX_LISTED_NAMES = 20
"""More names than these hide the one that is meant."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is not a known `kind`, list what there is, and offer the closest match."""
    names = sorted(known)
    if not names:
        return f"unknown {kind} '{name}'; there is none."
    close = difflib.get_close_matches(name, names, n=1)
    if close and len(names) > MAX_LISTED_NAMES:
        return f"unknown {kind} '{name}'. Did you mean '{close[0]}'?"
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"unknown {kind} '{name}'; there are: {', '.join(names)}.{hint}"
