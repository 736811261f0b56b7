"""One claimed job's whole life in a worker: claim, heartbeat, handler, and exactly one end.

Knows nothing of Celery and of what the handlers do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import FailReason, JobKind, Phase
from tevatron.core.errors import (
    ConfigError,
    ContractError,
    FormatError,
    InputError,
    JobError,
    NotFoundError,
    PairError,
    PromptError,
    TevatronError,
)
from tevatron.core.logging import bound
from tevatron.core.settings import Settings
from tevatron.core.store.claims import (
    CancelRequestedError,
    Claim,
    claim_next_job,
    fail,
    finish_cancelled,
    lose,
    release,
    succeed,
)
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.session import Sessions
from tevatron.core.worker.context import RETRY_S, TRANSIENT, JobContext, Stopped, StopReason

__all__ = [
    "AttemptLostError",
    "Finished",
    "Handler",
    "JobContext",
    "StopReason",
    "Stopped",
    "run_next_job",
]

logger = logging.getLogger(__name__)

_REASONS: dict[type[Exception], FailReason] = {
    FormatError: FailReason.DATA_ERROR,
    PairError: FailReason.DATA_ERROR,
    ContractError: FailReason.CONTRACT_MISMATCH,
    PromptError: FailReason.CONFIG_ERROR,
    ConfigError: FailReason.CONFIG_ERROR,
    NotFoundError: FailReason.CONFIG_ERROR,
    InputError: FailReason.DATA_ERROR,
}
"""The first that fits, in this order."""

_REASON_CODES = frozenset(FailReason)
_PHASES = frozenset(Phase)


class AttemptLostError(TevatronError):
    """What the handler ran was killed from outside: another attempt may do better. None of its processes is left."""

    code = "attempt_lost"


_PASSING = (AttemptLostError, *TRANSIENT)
"""Another attempt may go well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a handler that has done its work leaves."""

    result: dict[str, JsonValue]
    """For the user."""
    write: Callable[[Session], None] | None = None
    """Stores the job's output rows, in the transaction in which the job succeeds."""
    discard: Callable[[], None] | None = None
    """Removes the published files when a cancel came at the last moment."""


# Each handler takes its own kind of spec, which a mapping by kind cannot say.
Handler = Callable[[JobContext, Any], Finished]

End = Callable[[Session], None]


def run_next_job(
    kinds: Collection[JobKind],
    *,
    handlers: Mapping[JobKind, Handler],
    settings: Settings,
    sessions: Sessions,
    worker_name: str,
    should_stop: Callable[[], bool],
) -> bool:
    """Claim a job and bring it to an end; False when there is none, or the worker shuts down."""
    if should_stop():
        return False
    claimed_at = time.monotonic()
    with sessions.begin() as session:
        claim = claim_next_job(session, kinds, worker=worker_name, lease_s=settings.lease_s)
    if claim is None:
        return False
    context = JobContext(
        claim,
        settings=settings,
        sessions=sessions,
        should_stop=should_stop,
        claimed_at=claimed_at,
    )
    with bound(job_id=claim.job_id, attempt=claim.attempt):
        logger.info("job %s: attempt %d starts", claim.job_id, claim.attempt)
        with context.beating():
            outcome = _work(context, handlers[claim.kind])
        _end(context, outcome)
        spent = f"{_name(outcome)} after {time.monotonic() - claimed_at:.0f} s"
        logger.info("job %s: attempt %d %s", claim.job_id, claim.attempt, spent)
    return True


def _name(outcome: Finished | Exception) -> str:
    if isinstance(outcome, Stopped):
        return f"stopped ({outcome.reason})"
    return "finished" if isinstance(outcome, Finished) else "failed"


def _work(context: JobContext, handler: Handler) -> Finished | Exception:
    try:
        return handler(context, context.claim.spec)
    except Stopped as stopped:
        return stopped
    except Exception as error:
        # The border of the job: whatever it was, the worker goes on and the job says what happened.
        if not isinstance(error, (JobError, InputError, *_PASSING)):
            logger.exception("the job's handler failed")
        return error


def _end(context: JobContext, outcome: Finished | Exception) -> None:
    claim = context.claim
    if isinstance(outcome, Finished):
        try:
            _store(context, lambda session: _succeed(session, claim, outcome))
        except CancelRequestedError:
            if outcome.discard is not None:
                outcome.discard()
            _store(context, lambda session: finish_cancelled(session, claim))
        except Exception as error:
            # What the job made cannot be stored: a fault of ours, and not one that another attempt heals.
            logger.exception("the job's output cannot be stored")
            _store(context, _failure(claim, error))
    elif isinstance(outcome, Stopped):
        if outcome.reason is StopReason.CANCELLED:
            _store(context, lambda session: finish_cancelled(session, claim))
        elif outcome.reason is StopReason.SHUTDOWN:
            _store(context, lambda session: release(session, claim))
    elif context.stop_reason is StopReason.SHUTDOWN and not isinstance(outcome, InputError):
        # The signal that ends us may have ended the handler's processes before it could look.
        logger.warning(
            "job %s is released, it failed while shutting down: %s", claim.job_id, outcome
        )
        _store(context, lambda session: release(session, claim))
    elif isinstance(outcome, _PASSING):
        logger.warning("job %s: attempt %d is lost: %s", claim.job_id, claim.attempt, outcome)
        lost, most = str(outcome), context.settings.max_attempts
        _store(context, lambda session: lose(session, claim, message=lost, max_attempts=most))
    else:
        _store(context, _failure(claim, outcome))


def _succeed(session: Session, claim: Claim, finished: Finished) -> None:
    if succeed(session, claim, finished.result) and finished.write is not None:
        finished.write(session)


def _failure(claim: Claim, error: Exception) -> End:
    reason = FailReason.INTERNAL_ERROR
    phase: Phase | None = None
    message = str(error)
    if isinstance(error, JobError):
        reason = FailReason(error.reason) if error.reason in _REASON_CODES else reason
        phase = Phase(error.phase) if error.phase in _PHASES else None
    else:
        known = next((kind for kind in _REASONS if isinstance(error, kind)), None)
        if known is None:
            message = f"{type(error).__name__}: {error}"
        else:
            reason = _REASONS[known]
    logger.warning("job %s fails: %s: %s", claim.job_id, reason, message)
    return lambda session: fail(session, claim, reason=reason, phase=phase, message=message)


def _store(context: JobContext, write: End) -> None:
    """Store reports and the end, however often it takes, as long as the job is ours."""
    while context.stop_reason is not StopReason.LEASE_LOST:
        try:
            context.store_reports()
            with context.sessions.begin() as session:
                write(session)
        except LeaseLostError as error:
            context.lose_lease(str(error))
        except TRANSIENT as error:
            context.note_silence(error)
            time.sleep(RETRY_S)
        else:
            return
