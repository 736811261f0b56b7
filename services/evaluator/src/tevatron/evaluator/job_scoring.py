"""Scoring within a job: its scorers are waited for, found again when they move, and borne with while they are away.

Knows the job's scorers and what may go wrong with them, not what is scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tevatron.core.contracts.jobs import FailReason, Phase
from tevatron.core.errors import JobError, UnavailableError
from tevatron.core.worker.runner import JobContext
from tevatron.evaluator.answers import (
    NotFiniteScoreError,
    ScorerAnswerError,
    ScorerRefusedError,
    ScorersDifferError,
)
from tevatron.evaluator.pool import Backend, Backends, PoolOptions, learn_served
from tevatron.evaluator.scorers import Endpoint, JobScorers
from tevatron.evaluator.served import Served

GIVE_UP_S = 60.0
"""How long scorers whose rows say `ready` may fail to answer, on top of two leases: by then a dead host is known."""

Result = TypeVar("Result")


class JobScoring:
    """Scores for one job, on whatever its scorers are at the moment."""

    def __init__(self, ctx: JobContext, scorers: JobScorers, options: PoolOptions | None) -> None:
        self.options = options
        self._ctx = ctx
        self._scorers = scorers
        self._phase: Phase | None = None
        self._trouble_since: float | None = None
        self._endpoints: list[Endpoint] = []

    def run(
        self, score: Callable[[Backends, Served], Result], *, num_kept: Callable[[], int]
    ) -> Result:
        """Return what `score` does with the job's backends; it is called again where they all failed it.

        Args:
            num_kept: number of scores that a further call would not ask for.
        """
        while True:
            self._find_scorers()
            backends = [endpoint.backend for endpoint in self._endpoints]
            had = num_kept()
            try:
                served = learn_served(backends, options=self.options, check=self._ctx.check)
                return score(self._ready, served)
            except (UnavailableError, ScorerRefusedError) as error:
                self._bear(error, num_kept=num_kept(), progressed=num_kept() > had)
            except (ScorerAnswerError, ScorersDifferError) as error:
                raise _scorer_failed(str(error)) from error
            except NotFiniteScoreError as error:
                raise JobError(
                    str(error), reason=FailReason.NOT_FINITE, phase=Phase.SCORING
                ) from error

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far it is, and that the scorers are in use."""
        # A scorer that was away may come back under the same address.
        self._enter(Phase.SCORING)
        self._ctx.progress(done, total, unit)
        self._scorers.touch()

    def _ready(self) -> list[Backend]:
        """Return what is ready now: replicas come one by one, and come back elsewhere."""
        return [endpoint.backend for endpoint in self._scorers.ready()]

    def _find_scorers(self) -> None:
        if not self._endpoints or self._trouble_since is not None:
            self._enter(Phase.WAITING_FOR_SCORER)
        endpoints = self._scorers.wait_ready()
        if endpoints != self._endpoints:
            self._trouble_since = None
        self._endpoints = endpoints
        if self._trouble_since is None:
            self._enter(Phase.SCORING)

    def _bear(
        self, error: UnavailableError | ScorerRefusedError, *, num_kept: int, progressed: bool
    ) -> None:
        """Go on waiting for scorers that do not answer, or give up."""
        if isinstance(error, ScorerRefusedError) and all(
            endpoint.external for endpoint in self._endpoints
        ):
            # Nobody will write another address or token for it.
            raise _scorer_failed(str(error)) from error
        now = time.monotonic()
        if self._trouble_since is None or progressed:
            self._trouble_since = now
            self._ctx.log("warning", f"{error}; waiting for it, {num_kept} scores are kept")
        give_up_s = GIVE_UP_S + 2 * self._ctx.settings.lease_s
        if now - self._trouble_since > give_up_s:
            raise _scorer_failed(f"{error}; waited {give_up_s:.0f} s for it") from error
        self._ctx.wait(self._ctx.settings.poll_s)
        self._ctx.check()

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._ctx.phase(phase)


def _scorer_failed(message: str) -> JobError:
    return JobError(message, reason=FailReason.SCORER_FAILED, phase=Phase.SCORING)
