"""The host's loop: claim what is wanted while there are slots, step every slot, and give all back on SIGTERM.

One thread does it all, because a child lives only as long as the thread that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from urllib.parse import urlsplit

import httpx

from tevatron.core.errors import ConfigError
from tevatron.core.logging import configure_logging
from tevatron.core.settings import Settings
from tevatron.core.store.scorers import claim_next_scorer
from tevatron.core.store.session import Sessions, check_schema, make_engine, make_sessions
from tevatron.core.worker.context import TRANSIENT
from tevatron.scorer.host.child import Bound
from tevatron.scorer.host.slot import Place, Slot
from tevatron.scorer.host.targets import engines

logger = logging.getLogger(__name__)

_STEP_S = 0.1
_IDLE_STEP_S = 0.25


class Host:
    """Serves scorers until it is told to stop."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._settings = settings
        self._sessions = sessions
        self._name = f"scorer@{socket.gethostname()}:{os.getpid()}"
        self._free = places(settings)
        self._engines = engines(settings)
        self._slots: list[Slot] = []
        self._next_claim = 0.0
        self._stop_requested = False

    def request_stop(self, *_: object) -> None:
        """Stop soon; safe in a signal handler."""
        self._stop_requested = True

    def run(self) -> None:
        """Serve until `request_stop`, then until every child is gone and its row is given back."""
        # trust_env: a proxy that is meant for the outside must not see our children.
        with httpx.Client(trust_env=False) as client:
            try:
                while not self._stop_requested:
                    self._guarded_step(client)
                    time.sleep(_STEP_S if self._slots else _IDLE_STEP_S)
                self._give_back()
            finally:
                for slot in self._slots:
                    slot.kill()

    def _guarded_step(self, client: httpx.Client) -> None:
        try:
            self._claim(client)
            self._step_slots()
        except TRANSIENT:
            # Children go on serving. Once the database is back, a beat tells which leases were lost meanwhile.
            logger.exception("the database does not answer")
            time.sleep(self._settings.poll_s)

    def _claim(self, client: httpx.Client) -> None:
        now = time.monotonic()
        if not self._free or now < self._next_claim:
            return
        with self._sessions.begin() as session:
            claim = claim_next_scorer(
                session, host=self._name, lease_s=self._settings.lease_s, engines=self._engines
            )
        if claim is None:
            self._next_claim = now + self._settings.poll_s
            return
        logger.info("claimed %s", claim.scorer_id)
        self._slots.append(
            Slot(
                claim,
                place=self._free.pop(),
                settings=self._settings,
                sessions=self._sessions,
                client=client,
            )
        )

    def _step_slots(self) -> None:
        for slot in list(self._slots):
            slot.step()
            if slot.is_over:
                self._slots.remove(slot)
                self._free.append(slot.place)

    def _give_back(self) -> None:
        deadline = time.monotonic() + self._settings.kill_grace_s + 5
        for slot in self._slots:
            slot.request_stop()
        while self._slots and time.monotonic() < deadline:
            try:
                self._step_slots()
            except TRANSIENT:
                logger.exception("the database does not answer: the reaper gives the scorers back")
                return
            time.sleep(_STEP_S)


def places(settings: Settings) -> list[Place]:
    """Return one place for each scorer that this host may serve: a GPU each, or `scorer_slots` on a CPU."""
    devices = settings.devices.split(",") if settings.devices else [None]
    if settings.devices is None or settings.devices == "cpu":
        devices = devices * settings.scorer_slots
    if not devices:
        raise ConfigError(f"scorer_slots must be at least 1, got {settings.scorer_slots}")
    bounds = [_bound(settings.advertise_url, place) for place in range(len(devices))]
    return [
        Place(bound=bound, devices=device) for bound, device in zip(bounds, devices, strict=True)
    ]


def _bound(advertise_url: str | None, place: int) -> Bound:
    """Return where a place listens: on loopback, or on all addresses where others reach this host by a URL."""
    if advertise_url is None:
        return Bound(bind_host="127.0.0.1", port=0, advertised_host="127.0.0.1")
    parts = urlsplit(advertise_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"TEVATRON_ADVERTISE_URL: expected http://host or http://host:port, got '{advertise_url}'"
        )
    # A port that is given is the first place's; the others follow it. Network policies want fixed ports.
    port = 0 if parts.port is None else parts.port + place
    return Bound(bind_host="0.0.0.0", port=port, advertised_host=parts.hostname)


def serve(settings: Settings) -> int:
    """Run a host until SIGTERM or SIGINT; return its exit status."""
    configure_logging("scorer-host")
    # It would log every probe.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    engine = make_engine(settings.require_database())
    check_schema(engine)
    host = Host(settings, make_sessions(engine))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, host.request_stop)
    try:
        host.run()
    finally:
        engine.dispose()
    return 0
