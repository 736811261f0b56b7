"""Scorers as a desired state: somebody wants one, a scorer host claims it, serves it and lets it go.

    wanted -> starting -> ready -> stopping -> stopped
    starting, ready -> failed            it cannot be served; the error says why
    ready -> starting                    its host starts the server again
    starting, ready -> wanted            its host died: the next one takes it
    wanted -> stopped                    let go before a host took it

A scorer with `job_id` lives as long as its job; one with `ttl_s` as long as it is used; an external one until it is
deleted. Every write of a host is guarded by id and fence.

A scorer with replicas is a row for each. Hosts claim, serve and lose rows, and know nothing of replicas; what people and
jobs do (ask, find, use, let go) is done to all rows of a scorer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from pydantic import JsonValue
from sqlalchemy import Select, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from tevatron.core.contracts.jobs import FINAL_STATES, JobState
from tevatron.core.errors import ConflictError, NotFoundError, unknown_name
from tevatron.core.ids import new_id
from tevatron.core.store.leases import claim_row, held_row, lapsed_rows, renew
from tevatron.core.store.lifecycle import storable
from tevatron.core.store.models import Job, Scorer, ScorerState
from tevatron.core.store.replicas import Replicas, any_replica, last_used_at
from tevatron.core.store.repository import KeyScope, Repository, owned_by

LIVE_STATES = frozenset({ScorerState.WANTED, ScorerState.STARTING, ScorerState.READY})
HELD_STATES = frozenset({ScorerState.STARTING, ScorerState.READY, ScorerState.STOPPING})
SERVED_STATES = frozenset({ScorerState.STARTING, ScorerState.READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTarget:
    """What to serve: exactly one of checkpoint and model, by id."""

    checkpoint_id: str | None = None
    model_id: str | None = None
    engine: str = "hf"
    dtype: str | None = None
    prompt_template: str | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerClaim:
    """A scorer that this host serves until its lease is over."""

    scorer_id: str
    key_id: str | None
    fence: int
    target: ScorerTarget


@dataclass(frozen=True, slots=True)
class ScorerBeat:
    """What a heartbeat learns."""

    stop_requested: bool


class ScorerRepository(Repository[Scorer]):
    """Scorers as users and jobs see them: `get` and `list_page` return first rows."""

    table = Scorer
    noun: ClassVar[str] = "scorer"

    def get_live(self, ref: str, *, key_id: KeyScope) -> Scorer:
        """Return the scorer, of which a replica must be there or on its way."""
        live = self._session.scalars(
            self._visible(key_id)
            .where(or_(Scorer.id == ref, Scorer.name == ref), any_replica(LIVE_STATES))
            .order_by((Scorer.id == ref).desc(), *self._own_first(key_id), Scorer.created_at.desc())
            .limit(1)
        ).first()
        if live is not None:
            return live
        [replicas] = self.replicas([self.get(ref, key_id=key_id).id])
        raise ConflictError(f"scorer '{ref}' is {replicas.best.state}; start another")

    def replicas(self, scorer_ids: Sequence[str]) -> list[Replicas]:
        """Return these scorers in this order, each with all its replicas, whoever owns them."""
        rows: dict[str, list[Scorer]] = {scorer_id: [] for scorer_id in scorer_ids}
        for row in self._session.scalars(
            select(Scorer)
            .where(Scorer.scorer_id.in_(scorer_ids))
            .order_by(Scorer.replica)
            .execution_options(populate_existing=True)
        ):
            rows[row.scorer_id].append(row)
        if gone := [scorer_id for scorer_id, found in rows.items() if not found]:
            raise NotFoundError(f"{self.noun} '{gone[0]}' is gone")
        return [Replicas(found) for found in rows.values()]

    def register_external(
        self, url: str, *, key_id: str | None, name: str | None, token: str | None, engine: str
    ) -> Scorer:
        """Store an outside URL; whether it is allowed was checked by the caller."""
        scorer_id = new_id("scorer")
        scorer = Scorer(
            id=scorer_id,
            scorer_id=scorer_id,
            key_id=key_id,
            name=name,
            state=ScorerState.READY,
            external=True,
            engine=engine,
            url=url,
            token=token,
            ready_at=datetime.now(UTC),
        )
        self._session.add(scorer)
        self._session.flush()
        return scorer

    def of_checkpoint(self, checkpoint_id: str, *, key_id: KeyScope) -> list[Replicas]:
        """Return the key's scorers of this checkpoint that are there or on their way, newest first."""
        found = self._session.scalars(
            self._visible(key_id)
            .where(Scorer.checkpoint_id == checkpoint_id, any_replica(LIVE_STATES))
            .order_by(Scorer.created_at.desc(), Scorer.id.desc())
        )
        return self.replicas([scorer.id for scorer in found])

    def touch(self, scorer_ids: Sequence[str]) -> None:
        """Note that these are in use, so that their time to live starts again; on the first rows, which is enough."""
        self._session.execute(
            update(Scorer)
            .where(Scorer.id.in_(scorer_ids))
            .values(last_used_at=func.clock_timestamp())
            .execution_options(synchronize_session=False)
        )

    def count_by_state(self) -> dict[ScorerState, int]:
        """Count the replicas of all scorers of all keys, for metrics."""
        rows = self._session.execute(
            select(Scorer.state, func.count().label("number")).group_by(Scorer.state)
        )
        return {row.state: row.number for row in rows}

    def _visible(self, key_id: KeyScope) -> Select[Scorer]:
        return select(Scorer).where(
            Scorer.replica == 1, or_(owned_by(Scorer.key_id, key_id), Scorer.external)
        )


def request_scorer(
    session: Session,
    target: ScorerTarget,
    *,
    key_id: str | None,
    job_id: str | None = None,
    name: str | None = None,
    ttl_s: float | None = None,
    replicas: int = 1,
) -> str:
    """Want a scorer and return its id; a job that asks again gets the one that it has."""
    if job_id is not None:
        # The job's row is locked so that two attempts cannot ask at the same moment.
        session.execute(select(Job.id).where(Job.id == job_id).with_for_update())
        found = session.scalar(
            select(Scorer.scorer_id)
            .where(Scorer.job_id == job_id, Scorer.state.in_(LIVE_STATES))
            .limit(1)
        )
        if found is not None:
            return found
    scorer_id = new_id("scorer")
    session.add_all(
        Scorer(
            id=scorer_id if replica == 1 else f"{scorer_id}-{replica}",
            scorer_id=scorer_id,
            replica=replica,
            key_id=key_id,
            name=name,
            job_id=job_id,
            ttl_s=ttl_s,
            state=ScorerState.WANTED,
            checkpoint_id=target.checkpoint_id,
            model_id=target.model_id,
            engine=target.engine,
            dtype=target.dtype,
            prompt_template=target.prompt_template,
            max_length=target.max_length,
        )
        for replica in range(1, replicas + 1)
    )
    session.flush()
    return scorer_id


def release_scorer(session: Session, scorer_id: str) -> None:
    """Let it go: hosts stop its replicas; one that nobody serves is stopped at once. Repeating it does no harm."""
    rows = session.scalars(
        select(Scorer)
        .where(Scorer.scorer_id == scorer_id)
        .order_by(Scorer.replica)
        .with_for_update()
        .execution_options(populate_existing=True)
    ).all()
    if not rows:
        raise NotFoundError(unknown_name("scorer", scorer_id, []))
    for row in rows:
        _let_go(row)
    session.flush()


def claim_next_scorer(
    session: Session, *, host: str, lease_s: float, engines: Collection[str] = ("hf",)
) -> ScorerClaim | None:
    """Claim the oldest replica that nobody serves, of an engine that the host has: first ones before second ones."""
    is_meant = and_(Scorer.state == ScorerState.WANTED, Scorer.engine.in_(engines))
    # Whoever has no server at all does not wait for somebody else's third.
    scorer = claim_row(
        session, Scorer, is_meant, holder=host, lease_s=lease_s, first=[Scorer.replica.expression]
    )
    if scorer is None:
        return None
    scorer.state = ScorerState.STARTING
    session.flush()
    return ScorerClaim(
        scorer_id=scorer.id,
        key_id=scorer.key_id,
        fence=scorer.fence,
        target=ScorerTarget(
            checkpoint_id=scorer.checkpoint_id,
            model_id=scorer.model_id,
            engine=scorer.engine,
            dtype=scorer.dtype,
            prompt_template=scorer.prompt_template,
            max_length=scorer.max_length,
        ),
    )


def beat_scorer(session: Session, claim: ScorerClaim, lease_s: float) -> ScorerBeat:
    """Renew the lease, and learn whether to stop. Raises `LeaseLostError`: then stop without a write."""
    state = renew(
        session, Scorer, claim.scorer_id, fence=claim.fence, states=HELD_STATES, lease_s=lease_s
    )
    return ScorerBeat(stop_requested=state == ScorerState.STOPPING)


def scorer_ready(
    session: Session, claim: ScorerClaim, *, url: str, token: str, info: dict[str, JsonValue]
) -> bool:
    """Say where it answers; False when it was let go meanwhile: then stop it."""
    scorer = _held(session, claim)
    if scorer.state is ScorerState.STOPPING:
        return False
    scorer.state = ScorerState.READY
    scorer.url = url
    scorer.token = token
    cleaned = storable(info)
    assert isinstance(cleaned, dict)
    scorer.info = cleaned
    scorer.ready_at = scorer.last_used_at = datetime.now(UTC)
    return True


def scorer_restarting(session: Session, claim: ScorerClaim) -> bool:
    """Say that its server died and is started again; False when it was let go meanwhile."""
    scorer = _held(session, claim)
    if scorer.state is ScorerState.STOPPING:
        return False
    scorer.state = ScorerState.STARTING
    scorer.url = scorer.token = None
    return True


def scorer_failed(session: Session, claim: ScorerClaim, error: str) -> None:
    """Give up on it, and say why."""
    _finish(_held(session, claim), ScorerState.FAILED, error=error)


def scorer_stopped(session: Session, claim: ScorerClaim) -> None:
    """Say that no process of it is left; one that is still wanted (the host shuts down) goes to another host."""
    scorer = _held(session, claim)
    if scorer.state is ScorerState.STOPPING:
        _finish(scorer, ScorerState.STOPPED)
    else:
        _want_again(scorer)


def reap_scorers(session: Session, *, grace_s: float, max_attempts: int) -> list[str]:
    """Let go what no job needs or nobody used for its time to live; offer again what a dead host served."""
    touched: list[str] = []
    for scorer in [*_unneeded(session)]:
        _let_go(scorer)
        touched.append(scorer.id)
    session.flush()
    for scorer in lapsed_rows(session, Scorer, states=HELD_STATES, grace_s=grace_s):
        scorer.lost_attempts += 1
        if scorer.state is ScorerState.STOPPING:
            _finish(scorer, ScorerState.STOPPED)
        elif scorer.lost_attempts >= max_attempts:
            error = (
                f"{scorer.lost_attempts} hosts were lost while they served it, {scorer.holder} last"
            )
            _finish(scorer, ScorerState.FAILED, error=error)
        else:
            _want_again(scorer)
        touched.append(scorer.id)
    session.flush()
    return touched


def _unneeded(session: Session) -> Sequence[Scorer]:
    job_over = and_(Scorer.job_id.is_not(None), Job.state.in_(FINAL_STATES))
    idle = and_(
        any_replica({ScorerState.READY}),
        Scorer.job_id.is_(None),
        Scorer.ttl_s.is_not(None),
        last_used_at() + func.make_interval(0, 0, 0, 0, 0, 0, Scorer.ttl_s)
        < func.clock_timestamp(),
    )
    # Its worker is gone, and another job waits for a host: in the only slot of the only host it would keep that job
    # waiting, and that job the only worker, for ever. The queued job asks again when it is claimed.
    starving = aliased(Scorer)
    in_the_way = and_(
        any_replica(SERVED_STATES),
        Scorer.job_id.is_not(None),
        Job.state == JobState.QUEUED,
        exists().where(
            starving.state == ScorerState.WANTED, ~any_replica(SERVED_STATES, of=starving)
        ),
    )
    return session.scalars(
        select(Scorer)
        .outerjoin(Job, Job.id == Scorer.job_id)
        .where(Scorer.state.in_(LIVE_STATES), ~Scorer.external, or_(job_over, idle, in_the_way))
        .with_for_update(of=Scorer, skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()


def _held(session: Session, claim: ScorerClaim) -> Scorer:
    return held_row(session, Scorer, claim.scorer_id, fence=claim.fence, states=HELD_STATES)


def _let_go(scorer: Scorer) -> None:
    if scorer.external or scorer.state is ScorerState.WANTED:
        if scorer.state in LIVE_STATES:
            _finish(scorer, ScorerState.STOPPED)
    elif scorer.state in SERVED_STATES:
        scorer.state = ScorerState.STOPPING


def _want_again(scorer: Scorer) -> None:
    scorer.state = ScorerState.WANTED
    scorer.url = scorer.token = scorer.lease_until = None


def _finish(scorer: Scorer, state: ScorerState, *, error: str | None = None) -> None:
    scorer.state = state
    scorer.error = None if error is None else str(storable(error))
    scorer.url = scorer.token = scorer.lease_until = None
    scorer.finished_at = datetime.now(UTC)
