"""The scorers that one job uses: asked for, waited for, found again when they move, let go.

Rows are the truth: a host that dies leaves its row to another one, which writes a new address. Knows rows and the job's
context, not pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import FailReason, Phase, ScoredBy
from tevatron.core.errors import JobError
from tevatron.core.store.models import Scorer, ScorerState
from tevatron.core.store.registered import DatasetRepository
from tevatron.core.store.scorers import (
    LIVE_STATES,
    ScorerRepository,
    ScorerTarget,
    release_scorer,
    request_scorer,
)
from tevatron.core.worker.context import TRANSIENT
from tevatron.core.worker.runner import JobContext
from tevatron.evaluator.pool import Backend

_LET_GO = frozenset({ScorerState.STOPPING, ScorerState.STOPPED})
TOUCH_S = 10.0
"""How often scorers with a time to live are said to be in use."""
REMIND_S = 60.0
"""How often a job that waits says so."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A scorer that is ready, as of one look; another fence means another process."""

    scorer_id: str
    fence: int
    external: bool
    backend: Backend


def patiently(ctx: JobContext, work: Callable[[Session], Found]) -> Found:
    """Do `work` in one transaction, however long the database is away, as long as the job is ours."""
    while True:
        ctx.check()
        try:
            with ctx.sessions.begin() as session:
                return work(session)
        except TRANSIENT as error:
            ctx.note_silence(error)
            ctx.wait(ctx.settings.poll_s)


def dataset_path(ctx: JobContext, dataset_id: str) -> Path:
    """Return where a registered dataset lies."""
    dataset = patiently(ctx, lambda session: DatasetRepository(session).by_id(dataset_id))
    return ctx.settings.data / dataset.path


class JobScorers:
    """The scorers of one attempt."""

    def __init__(self, ctx: JobContext, wanted: ScoredBy) -> None:
        self._ctx = ctx
        self._wanted = wanted
        self._ids: list[str] = list(wanted.scorers or [])
        self._touched = time.monotonic()

    @property
    def own(self) -> bool:
        """Whether the job asked for its scorer, in place of naming ones that are there."""
        return self._wanted.scorers is None

    def request(self) -> None:
        """Ask for the job's scorer; an earlier attempt's is found again."""
        if not self.own:
            return
        wanted, claim = self._wanted, self._ctx.claim
        target = ScorerTarget(
            checkpoint_id=wanted.checkpoint if isinstance(wanted.checkpoint, str) else None,
            model_id=wanted.model,
            engine=wanted.engine,
            dtype=wanted.dtype,
            prompt_template=wanted.prompt_template,
            max_length=wanted.max_length,
        )
        scorer_id = patiently(
            self._ctx,
            lambda session: request_scorer(
                session,
                target,
                key_id=claim.key_id,
                job_id=claim.job_id,
                name=claim.name,
                replicas=wanted.replicas,
            ),
        )
        self._ids = [scorer_id]

    def rows(self) -> Sequence[Scorer]:
        """Return the rows as they are now: one for each replica of each scorer."""
        return patiently(
            self._ctx,
            lambda session: [
                row
                for scorer in ScorerRepository(session).replicas(self._ids)
                for row in scorer.rows
            ],
        )

    def ready(self) -> list[Endpoint]:
        """Return those that are ready now."""
        return [_endpoint(row) for row in self.rows() if row.state is ScorerState.READY]

    def wait_ready(self) -> list[Endpoint]:
        """Wait until at least one is ready, and return those that are; none that can become ready is the job's failure."""
        reminded = time.monotonic()
        while True:
            rows = self.rows()
            ready = [_endpoint(row) for row in rows if row.state is ScorerState.READY]
            if ready:
                return ready
            if not any(row.state in LIVE_STATES for row in rows):
                if self.own and any(row.state in _LET_GO for row in rows):
                    # Somebody wanted it restarted, or it made room for a job while this one was queued.
                    self._ctx.log(
                        "warning", f"scorer {self._ids[0]} was let go; asking for another one"
                    )
                    self.request()
                    continue
                raise JobError(
                    _why_none(rows), reason=FailReason.SCORER_FAILED, phase=Phase.WAITING_FOR_SCORER
                )
            if time.monotonic() - reminded > REMIND_S:
                reminded = time.monotonic()
                states = ", ".join(_state(row) for row in rows)
                self._ctx.log("info", f"still waiting for a scorer: {states}")
            self._ctx.wait(self._ctx.settings.poll_s)

    def touch(self) -> None:
        """Say now and then that the scorers are in use."""
        if not self.own and time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()
            patiently(self._ctx, lambda session: ScorerRepository(session).touch(self._ids))

    def release(self) -> None:
        """Let the job's own scorer go; after a failure the reaper does it."""
        if self.own and self._ids:
            patiently(self._ctx, lambda session: release_scorer(session, self._ids[0]))


def _endpoint(row: Scorer) -> Endpoint:
    assert row.url is not None  # a CHECK of the table
    return Endpoint(
        scorer_id=row.id,
        fence=row.fence,
        external=row.external,
        backend=Backend(url=row.url, token=row.token),
    )


def _state(row: Scorer) -> str:
    if row.state is not ScorerState.WANTED:
        return f"{row.id} is {row.state.value}"
    # Hosts may come and go with the load, so that nobody can say that none will ever take it.
    needs = " (one with TEVATRON_VLLM_PYTHON set)" if row.engine == "vllm" else ""
    return f"no host with a free place and engine '{row.engine}'{needs} has taken {row.id}"


def _why_none(rows: Sequence[Scorer]) -> str:
    parts = []
    for row in rows:
        if row.state is ScorerState.FAILED:
            parts.append(f"scorer {row.id} failed: {row.error}")
        else:
            parts.append(
                f"scorer {row.id} is {row.state.value}: somebody let it go while this job needed it"
            )
    return "; ".join(parts)
