"""One slot of a host: a claimed scorer from its start to its end. Steps are short; the host calls them in turn.

starting --ready--> ready --died--> starting (once) --died--> failed
starting, ready --released--> stopping --gone--> stopped
starting, ready --host shuts down--> stopping --gone--> wanted again
any --lease lost--> killed, and nothing is written
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from pydantic import ValidationError
from sqlalchemy.orm import Session

from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.errors import ContractError, TevatronError
from tevatron.core.logging import bound as bound_ids
from tevatron.core.settings import Settings
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.scorers import (
    ScorerClaim,
    beat_scorer,
    scorer_failed,
    scorer_ready,
    scorer_restarting,
    scorer_stopped,
)
from tevatron.core.store.session import Sessions
from tevatron.scorer.host.child import Bound, Child
from tevatron.scorer.host.targets import interpreter, server_arguments

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_PROBE_EVERY_S = 0.3
_HEALTH_EVERY_S = 5.0
_SICK_PROBES = 6
"""Failed probes of a ready server, one after the other, after which it counts as dead."""
_STEADY_S = 300.0
"""A server that was ready for so long may be restarted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a slot's children run and listen."""

    bound: Bound
    devices: str | None
    """`cpu`, a GPU's index, or None for what is there."""


class Slot:
    """Serves one claim; `step` until `is_over`."""

    def __init__(
        self,
        claim: ScorerClaim,
        *,
        place: Place,
        settings: Settings,
        sessions: Sessions,
        client: httpx.Client,
    ) -> None:
        self.claim = claim
        self.place = place
        self.is_over = False
        self._settings = settings
        self._sessions = sessions
        self._client = client
        self._child: Child | None = None
        self._is_ready = False
        self._is_stopping = False
        self._restarts = 0
        self._num_sick = 0
        self._ready_since = 0.0
        self._next_beat = 0.0
        self._next_probe = 0.0

    def step(self) -> None:
        """Do what is due now: heartbeat, start, probe, restart, stop."""
        with bound_ids(scorer_id=self.claim.scorer_id):
            try:
                self._beat()
                if not self.is_over:
                    self._advance()
            except LeaseLostError:
                logger.warning("the lease is lost: another host may serve this scorer now")
                self.kill()

    def request_stop(self) -> None:
        """Let the child end in its own time; `step` goes on until it has."""
        self._is_stopping = True
        if self._child is not None:
            self._child.stop(grace_s=self._settings.kill_grace_s)

    def kill(self) -> None:
        """End the child now, and write nothing."""
        if self._child is not None:
            self._child.kill()
        self.is_over = True

    def _beat(self) -> None:
        # More often than a lease needs: the same write learns that the scorer is let go, and the slot is wanted.
        now = time.monotonic()
        if now < self._next_beat:
            return
        with self._sessions.begin() as session:
            beat = beat_scorer(session, self.claim, self._settings.lease_s)
        self._next_beat = now + min(self._settings.heartbeat_s, self._settings.poll_s)
        if beat.stop_requested and not self._is_stopping:
            logger.info("released")
            self.request_stop()

    def _advance(self) -> None:
        if self._is_stopping:
            if self._child is None or self._child.has_ended():
                self._write(lambda session: scorer_stopped(session, self.claim))
                self.is_over = True
        elif self._child is None:
            self._start()
        elif self._child.exit_status() is not None:
            self._died(self._child)
        else:
            self._probe(self._child)

    def _start(self) -> None:
        try:
            arguments = self._arguments()
            self._child = Child(
                arguments,
                bound=self.place.bound,
                devices=self.place.devices,
                python=interpreter(self.claim.target.engine, self._settings),
                allow_hub=self._settings.allow_hub,
            )
        except (TevatronError, OSError) as error:
            if isinstance(error, LeaseLostError):
                raise
            self._give_up(f"it cannot be started: {error}")
            return
        self._is_ready, self._num_sick, self._next_probe = False, 0, 0.0
        logger.info("server %d started for %s", self._child.pid, self._child.url)

    def _arguments(self) -> Sequence[str]:
        with self._sessions.begin() as session:
            return server_arguments(session, self.claim.target, self._settings)

    def _probe(self, child: Child) -> None:
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + (_HEALTH_EVERY_S if self._is_ready else _PROBE_EVERY_S)
        response = self._get(child, "/ready")
        answers = response is not None and response.status_code == httpx.codes.OK
        if response is not None and (refusal := _refusal(response)) is not None:
            # It stays up to say so; nothing that it waits for will change it.
            child.kill()
            self._give_up(refusal)
        elif self._is_ready:
            self._num_sick = 0 if answers else self._num_sick + 1
            if self._num_sick >= _SICK_PROBES:
                logger.error("the server does not answer any more: it is killed")
                child.kill()
        elif answers:
            self._announce(child)
        elif now - child.started_at > self._settings.scorer_start_s:
            child.kill()
            self._give_up(
                f"it was not ready within {self._settings.scorer_start_s:g} s: {child.last_error()}"
            )

    def _announce(self, child: Child) -> None:
        response = self._get(child, "/info")
        try:
            info = ScorerInfo.model_validate_json(response.content if response else b"")
        except ValidationError:
            return  # It ended between the two requests; the next step sees how.
        with self._sessions.begin() as session:
            wanted = scorer_ready(
                session,
                self.claim,
                url=child.url,
                token=child.token,
                info=info.model_dump(mode="json"),
            )
        if not wanted:
            self.request_stop()
            return
        self._is_ready, self._ready_since = True, time.monotonic()
        logger.info("ready at %s after %.1f s", child.url, self._ready_since - child.started_at)

    def _died(self, child: Child) -> None:
        """Start it once more, unless it said itself that it cannot serve."""
        error = child.last_error()
        if self._is_ready and time.monotonic() - self._ready_since > _STEADY_S:
            self._restarts = 0
        by_itself = (child.exit_status() or 0) > 0 and not self._is_ready
        if by_itself or self._restarts:
            self._give_up(error)
            return
        logger.error("the server died and is started again: %s", error)
        self._restarts += 1
        with self._sessions.begin() as session:
            wanted = scorer_restarting(session, self.claim)
        self._child, self._is_ready = None, False
        if not wanted:
            self.request_stop()

    def _give_up(self, error: str) -> None:
        logger.error("the scorer failed: %s", error)
        self._write(lambda session: scorer_failed(session, self.claim, error))
        self.is_over = True

    def _write(self, write: Callable[[Session], None]) -> None:
        with self._sessions.begin() as session:
            write(session)

    def _get(self, child: Child, path: str) -> httpx.Response | None:
        """Return the child's answer, or nothing where it gives none."""
        try:
            return self._client.get(
                f"{child.local_url}{path}",
                headers={"Authorization": f"Bearer {child.token}"},
                timeout=_PROBE_TIMEOUT_S,
            )
        except httpx.TransportError:
            return None


def _refusal(response: httpx.Response) -> str | None:
    """Return why the server will never be ready, where it says that it will not."""
    try:
        problem = response.json()
    except ValueError:
        return None
    if not isinstance(problem, dict) or problem.get("code") != ContractError.code:
        return None
    return str(problem.get("detail"))
