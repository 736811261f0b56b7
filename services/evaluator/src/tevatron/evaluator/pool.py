"""Client of one or several scorers: posts pairs to `/score` in chunks and gives back a score for each, or an error.

Each backend has some slots, and a slot that is free takes the next chunk from a common line: whoever is fastest gets
most. What a backend serves is asked before its first chunk and again whenever it was down, and must be the same
everywhere (see served.py). A chunk that a backend cannot do goes back to the line at once, for whoever is free, and the
backend pauses: growing and jittered after connection failures, timeouts and 5xx, as long as the scorer asks after 429
and 503. A chunk that is with one backend for long is asked of an idle one as well, and the first answer counts. Nothing
is dropped. Chunks grow until one takes `chunk_s`, so that a stop or a death never costs more. Backends may join while the
work is going on. Knows the wire, not jobs or where scorers come from.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

import httpx

from tevatron.core.contracts.scores import Candidate, ScoreRequest
from tevatron.core.errors import InputError, UnavailableError
from tevatron.evaluator.answers import (
    AgainError,
    RequestTooLargeError,
    ScorersDifferError,
    again,
    checked_scores,
    raise_if_refused,
    try_again,
)
from tevatron.evaluator.failures import Failures
from tevatron.evaluator.line import Chunk, Key, Line
from tevatron.evaluator.served import Served, ask_served

_VERY_LATE = 5
"""Times `hedge_s` after which a chunk is asked of another backend before that takes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a scorer answers."""

    url: str
    """Base URL; `/score` is added."""
    token: str | None = field(default=None, repr=False)


Backends = Sequence[Backend] | Callable[[], Sequence[Backend]]
"""Who does the work; a function is called every `look_s`, in a thread, and those that it has not returned before join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How the pool behaves; durations in seconds."""

    max_chunk: int = 1000
    """Pairs in one request."""
    first_chunk: int = 16
    chunk_s: float = 2.0
    """How long a request should take; the next chunk's size follows from the last one's speed."""
    slots: int = 2
    """Requests in flight at a backend, so that it has work while an answer is stored."""
    max_in_flight: int | None = None
    """Requests in flight at all backends together."""
    hedge_s: float = 10.0
    """A chunk that is with one backend for longer is asked of another one too, once that has nothing else to do."""
    timeout_s: float = 600.0
    """Longest wait for an answer."""
    connect_timeout_s: float = 5.0
    tries: int = 4
    """Failures in a row after which a backend counts as down."""
    backoff_s: float = 0.5
    """Pause after the first failure; doubles with each."""
    max_backoff_s: float = 10.0
    busy_s: float = 600.0
    """How long a backend may put us off by 429 and 503."""
    cooldown_s: float = 15.0
    """How long a backend that is down is left alone while others work."""
    poll_s: float = 0.2
    """How often `check` is called."""
    look_s: float = 2.0
    """How often backends are looked for, where a function finds them."""
    query_prefix: str | None = None
    """Sent along: a scorer refuses another one than its contract's."""
    passage_prefix: str | None = None


@dataclass(slots=True)
class _BackendState:
    backend: Backend
    client: httpx.AsyncClient
    chunk_size: int
    limit: int
    """Most pairs in a request."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    served: Served | None = None
    """What it said since it was last down."""
    down: str | None = None
    """Why it is down."""
    rest_until: float = 0.0
    """None of its slots sends anything before."""

    @classmethod
    def of(cls, backend: Backend, options: PoolOptions) -> _BackendState:
        """Begin with a backend."""
        # trust_env: a proxy that is meant for the outside must not see scorers.
        client = httpx.AsyncClient(
            base_url=backend.url,
            timeout=httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s),
            trust_env=False,
            headers={"Authorization": f"Bearer {backend.token}"} if backend.token else {},
        )
        first_chunk = min(options.first_chunk, options.max_chunk)
        return cls(backend, client, first_chunk, options.max_chunk)


def learn_served(
    backends: Sequence[Backend],
    *,
    options: PoolOptions | None = None,
    check: Callable[[], None] = lambda: None,
) -> Served:
    """Ask every backend what it serves; those that do not answer now are asked again before they get work.

    Args:
        check: called every `poll_s`; what it raises ends the asking.

    Raises:
        UnavailableError: none answers.
        ScorersDifferError: two serve different things.
        ScorerRefusedError: one refuses the token or the address, or does not say what it serves.
    """
    nothing: list[tuple[None, Candidate]] = []
    pool = _Pool(backends, Line(nothing, _no_sink), options or PoolOptions(), check, None)
    return asyncio.run(pool.learn())


def stream_scores(
    backends: Backends,
    pairs: Iterable[tuple[Key, Candidate]],
    sink: Callable[[Sequence[Key], Sequence[float]], None],
    *,
    served: Served | None = None,
    options: PoolOptions | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Score every pair once, and hand the scores to `sink` chunk by chunk in any order.

    Args:
        served: what every backend must serve; what the first one serves when unset.
        check: called every `poll_s`; what it raises ends the work, requests in flight included.

    Raises:
        UnavailableError: no backend answers.
        ScorersDifferError: a backend does not serve what the others do.
        ScorerAnswerError: an answer was not what was asked for.
        ScorerRefusedError: a backend refused the token or the address.
        InputError: a backend found a pair that cannot be scored; NotFiniteScoreError where the model gives no number.
    """
    line = Line(pairs, sink)
    look = backends if callable(backends) else None
    first = backends() if callable(backends) else backends
    asyncio.run(_Pool(first, line, options or PoolOptions(), check, served).run(look))
    line.check_complete()


def _no_sink(keys: Sequence[object], scores: Sequence[float]) -> None:
    raise AssertionError("an empty line has no scores")


class _Pool(Generic[Key]):
    def __init__(
        self,
        backends: Sequence[Backend],
        line: Line[Key],
        options: PoolOptions,
        check: Callable[[], None],
        served: Served | None,
    ) -> None:
        if not backends:
            raise UnavailableError("no scorer to send pairs to")
        self._line = line
        self._options = options
        self._check = check
        self._served = served
        """What every backend must serve."""
        self._states = [_BackendState.of(backend, options) for backend in backends]
        self._tasks: list[asyncio.Task[None]] = []
        # Without a limit of its own: each backend's slots are one.
        self._turns = asyncio.Semaphore(options.max_in_flight or sys.maxsize)

    async def learn(self) -> Served:
        """Return what all backends that answer serve."""
        await self._until_done(self._learn_patiently(state) for state in self._states)
        assert self._served is not None  # else all are down, which raises
        return self._served

    async def _learn_patiently(self, state: _BackendState) -> None:
        failed = Failures(tries=self._options.tries, busy_s=self._options.busy_s)
        while state.down is None:
            try:
                await self._know(state)
            except AgainError as error:
                self._bear(state, error, failed)
            else:
                return
            if state.down is None:
                await asyncio.sleep(state.rest_until - time.monotonic())

    async def run(self, look: Callable[[], Sequence[Backend]] | None) -> None:
        """Work until the line is finished."""
        jobs = [job for state in self._states for job in self._slots_of(state)]
        await self._until_done(jobs if look is None else [*jobs, self._welcome(look)])

    def _slots_of(self, state: _BackendState) -> list[Coroutine[None, None, None]]:
        return [self._serve(state) for _ in range(self._options.slots)]

    async def _welcome(self, look: Callable[[], Sequence[Backend]]) -> None:
        """Give work to backends that come later."""
        next_look = time.monotonic() + self._options.look_s
        while not self._line.finished:
            await asyncio.sleep(self._options.poll_s)
            if time.monotonic() < next_look:
                continue
            known = {state.backend for state in self._states}
            for backend in await asyncio.to_thread(look):
                if backend not in known:
                    self._states.append(state := _BackendState.of(backend, self._options))
                    self._tasks += map(asyncio.create_task, self._slots_of(state))
            next_look = time.monotonic() + self._options.look_s

    async def _until_done(self, jobs: Iterable[Coroutine[None, None, None]]) -> None:
        """Run all to their end, and those that join, or until one of them or `check` raises."""
        self._tasks += map(asyncio.create_task, jobs)
        try:
            while pending := [task for task in self._tasks if not task.done()]:
                self._check()
                done, _ = await asyncio.wait(
                    pending, timeout=self._options.poll_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for state in self._states:
                await state.client.aclose()

    async def _serve(self, state: _BackendState) -> None:
        """Take chunks for one slot of a backend until all work is done."""
        failed = Failures(tries=self._options.tries, busy_s=self._options.busy_s)
        while not self._line.finished:
            if not await self._rest(state):
                return
            async with self._turns:
                error = await self._work(state, failed)
            if error is not None:
                self._bear(state, error, failed)

    async def _work(self, state: _BackendState, failed: Failures) -> AgainError | None:
        """Do one chunk; return why the backend cannot."""
        chunk = (
            self._straggler(state, _VERY_LATE * self._options.hedge_s)
            or self._line.take(state.chunk_size)
            or self._straggler(state, self._options.hedge_s)
        )
        if chunk is None:
            if not self._line.finished:
                # The last chunks are with others, and may come back.
                await asyncio.sleep(self._options.poll_s)
            return None
        try:
            await self._know(state)
            scores = await self._attempt(state, chunk)
        except AgainError as error:
            self._line.drop(chunk)
            return error
        except RequestTooLargeError:
            self._halve(state, chunk)
        else:
            failed.forget()
            if scores is not None:
                self._line.done(chunk, scores)
        return None

    def _straggler(self, state: _BackendState, older_than_s: float) -> Chunk[Key] | None:
        return self._line.straggler(state.backend.url, older_than_s=older_than_s, limit=state.limit)

    async def _attempt(self, state: _BackendState, chunk: Chunk[Key]) -> list[float] | None:
        """Score a chunk at one backend; None where another one was faster."""
        attempt = asyncio.create_task(self._ask(state, chunk))
        chunk.attempts[attempt] = state.backend.url
        try:
            await asyncio.wait({attempt})
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            del chunk.attempts[attempt]
        return None if attempt.cancelled() else attempt.result()

    def _bear(self, state: _BackendState, error: AgainError, failed: Failures) -> None:
        """Pause after a failure; the backend is down where there were too many."""
        reason = failed.count(error)
        if reason is None:
            pause_s = max(error.pause_s, self._backoff(max(failed.in_a_row, 1)))
            state.rest_until = max(state.rest_until, time.monotonic() + pause_s)
            return
        failed.forget()
        state.down, state.served = reason, None
        state.rest_until = time.monotonic() + self._options.cooldown_s
        if all(state.down is not None for state in self._states):
            reasons = "; ".join(f"{state.backend.url}: {state.down}" for state in self._states)
            raise UnavailableError(f"no scorer answers: {reasons}")

    async def _rest(self, state: _BackendState) -> bool:
        """Wait until a backend may be asked again; False when there is nothing left to do."""
        while (left := state.rest_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._options.poll_s))
            if self._line.finished:
                return False
        state.down = None
        return True

    def _halve(self, state: _BackendState, chunk: Chunk[Key]) -> None:
        half = len(chunk) // 2
        if half == 0:
            pair = chunk.candidates[0]
            raise InputError(
                f"scorer {state.backend.url} finds one pair too large: query '{pair.query_id}', document "
                f"'{pair.docid}', {len(pair.query)} and {len(pair.text)} characters"
            )
        # The limit that it told stays: growing into it again would cost a request each time.
        state.chunk_size = state.limit = half
        self._line.drop(chunk, parts=chunk.split(half))

    async def _know(self, state: _BackendState) -> None:
        """Ask what the backend serves, unless it said so since it was last down."""
        async with state.asking:
            if state.served is not None:
                return
            with try_again():
                found = await ask_served(state.client, state.backend.url)
            if self._served is None:
                self._served = found
            elif difference := self._served.difference(found):
                raise ScorersDifferError(f"the scorers' scores cannot be compared: {difference}")
            state.served = found

    async def _ask(self, state: _BackendState, chunk: Chunk[Key]) -> list[float]:
        request = ScoreRequest(
            candidates=chunk.candidates,
            query_prefix=self._options.query_prefix,
            passage_prefix=self._options.passage_prefix,
        )
        started = time.monotonic()
        try:
            with try_again():
                response = await state.client.post(
                    "/score",
                    content=request.model_dump_json(exclude_none=True),
                    headers={"Content-Type": "application/json"},
                )
        except AgainError as error:
            # Whatever answers under this address next may be another process that serves something else.
            state.served = None
            if isinstance(error.__cause__, httpx.ReadTimeout):
                state.chunk_size = max(1, len(chunk) // 2)
            raise
        if response.status_code == httpx.codes.OK:
            scores = checked_scores(state.backend.url, chunk.candidates, response)
            self._adapt(state, len(chunk), time.monotonic() - started)
            return scores
        raise_if_refused(state.backend.url, chunk.candidates, response)
        raise again(response)

    def _backoff(self, tries: int) -> float:
        # Jitter: clients that were refused together do not come back together.
        longest = min(self._options.backoff_s * 2 ** (tries - 1), self._options.max_backoff_s)
        return float(longest * random.uniform(0.5, 1.0))

    def _adapt(self, state: _BackendState, num_pairs: int, elapsed_s: float) -> None:
        fits = int(num_pairs * self._options.chunk_s / max(elapsed_s, 1e-3))
        state.chunk_size = max(1, min(fits, 2 * state.chunk_size, state.limit))
