"""Continuous batching: prompts of all requests share calls of the engine, each of one pass at most.

A call is filled with the prompts whose turn it is and runs in a thread of the engine's own; the event loop stays free.
An engine that queues calls has the next ones while it runs one: so many that it is not through with them before another
one can be there, and so few that nobody waits for them for long. Knows no HTTP and no text.

Whose turn it is: the request's that would be through first if all had equal shares of the engine. So a small one waits
for the calls that run, however large the others are; none is through later than with equal shares; and requests of one
size end one after the other, so that their clients' next ones come while the engine is busy, where with equal shares all
would end together (the fair sojourn protocol: Friedman and Henderson, "Fairness and efficiency in web server protocols",
SIGMETRICS 2003).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from tevatron.core.errors import BusyError, InputError, TevatronError, UnavailableError
from tevatron.scorer.engines import Engine
from tevatron.scorer.server.meters import Meters

logger = logging.getLogger(__name__)

_FAILURES_UNTIL_BROKEN = 3
_MEMORY = 0.8
"""What the measured speed keeps of the calls before the last one."""


class NotFiniteError(InputError):
    """The model gives no number for a prompt."""

    code = "not_finite"

    def __init__(self, index: int, score: float) -> None:
        super().__init__(f"prompt {index} scores {score}, which is no finite number")
        self.index = index
        self.score = score


class EngineFailedError(TevatronError):
    """The engine raised; the log has it."""

    code = "engine_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is let in."""

    max_queue_tokens: int
    """Tokens that may wait; one request is always let in where none does."""
    deadline_s: float
    """After which a request without an answer is told to come again."""


class _Prompt(NamedTuple):
    place: int
    ids: Sequence[int]


_Call = list[tuple["Ticket", _Prompt]]


class Ticket:
    """One request's place in the queue: prompts are added as they are rendered; `scores` waits for all."""

    def __init__(self, batcher: Batcher, *, num_prompts: int, expected_tokens: int) -> None:
        self._batcher = batcher
        self.num_prompts = num_prompts
        self.expected_tokens = expected_tokens
        """Of prompts that are not added yet, roughly."""
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self.waiting: deque[_Prompt] = deque()
        self.waiting_tokens = 0
        self.fair_end = 0.0
        """Fair time at which equal shares would be through with it."""
        self.admitted_at = time.perf_counter()
        self.began_at: float | None = None
        self._num_added = 0
        self._scores: list[float | None] = [None] * num_prompts
        self._num_missing = num_prompts

    def add(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put the next prompts into the queue."""
        self.waiting.extend(_Prompt(self._num_added + at, ids) for at, ids in enumerate(prompts))
        self._num_added += len(prompts)
        assert self._num_added <= self.num_prompts, "more prompts than were announced"
        num_tokens = sum(len(ids) for ids in prompts)
        is_last = self._num_added == self.num_prompts
        expected = 0 if is_last else max(0, self.expected_tokens - num_tokens)
        # It takes more or less than was expected.
        self.fair_end += num_tokens + expected - self.expected_tokens
        self.waiting_tokens += num_tokens
        self.expected_tokens = expected
        self._batcher.arrived(self)

    async def scores(self) -> list[float]:
        """Return one score a prompt; `BusyError` once the deadline is over."""
        return await self._batcher.wait(self)

    def close(self) -> None:
        """Leave the queue: what has not run yet is not run any more. Repeating it does no harm."""
        self._batcher.forget(self)

    def settle(self, prompt: _Prompt, score: float) -> None:
        """Keep a score; the last one gives the answer."""
        if not math.isfinite(score):
            self.fail(NotFiniteError(prompt.place, score))
            return
        if self._scores[prompt.place] is not None:
            raise AssertionError(f"prompt {prompt.place} was scored twice")
        self._scores[prompt.place] = score
        self._num_missing -= 1
        if self._num_missing == 0 and not self.done.done():
            self.done.set_result([score for score in self._scores if score is not None])

    def fail(self, error: Exception) -> None:
        """Give the request an error, unless it has an answer."""
        if not self.done.done():
            self.done.set_exception(error)

    @property
    def num_scored(self) -> int:
        """Prompts that have a score."""
        return self.num_prompts - self._num_missing


class Batcher:
    """Owns the queue, and the engine while it runs."""

    def __init__(
        self,
        engine: Engine,
        *,
        threads: Executor,
        pass_tokens: int,
        queues_calls: bool,
        wait_s: float,
        limits: Limits,
        meters: Meters,
    ) -> None:
        """Begin to run calls.

        Args:
            engine: Called in `threads` alone.
            pass_tokens: Tokens of one pass of the engine, and of a call.
            queues_calls: Whether the engine takes further calls while it runs one; it has two where they wait.
            wait_s: It has more than two where they are whole passes and all together are expected to last no longer.
        """
        self._engine = engine
        self._threads = threads
        self._pass_tokens = pass_tokens
        self._queues_calls = queues_calls
        self._wait_s = wait_s
        self._limits = limits
        self._meters = meters
        self._tickets: dict[Ticket, None] = {}
        """Those that have no answer yet, as they came."""
        self._sharing: set[Ticket] = set()
        """Those that equal shares would not be through with, answered or not."""
        self._fair_time = 0.0
        """Tokens that equal shares would have given to each of those."""
        self._changed = asyncio.Event()
        """Prompts have come, or a call has ended."""
        self._running = 0
        """Calls that the engine has."""
        self._spent_tokens = self._spent_s = 0.0
        """Of the last calls; those before them count less and less."""
        self._last_end = 0.0
        """When the engine gave its last scores."""
        self._failures = 0
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="batcher")

    @property
    def is_broken(self) -> bool:
        """Whether the last calls all failed, or the batcher itself has ended."""
        return self._failures >= _FAILURES_UNTIL_BROKEN or self._task.done()

    @property
    def queue_tokens(self) -> int:
        """Tokens that wait, and those that are still being rendered."""
        return sum(ticket.waiting_tokens + ticket.expected_tokens for ticket in self._tickets)

    def admit(self, *, num_prompts: int, expected_tokens: int) -> Ticket:
        """Let a request in; `BusyError` where too many tokens wait. Whoever gets the ticket closes it."""
        if self._closed:
            raise _closing()
        waiting = self.queue_tokens
        if waiting and waiting + expected_tokens > self._limits.max_queue_tokens:
            self._meters.rejected.labels("queue_full").inc()
            raise BusyError(
                f"{waiting} tokens wait, {expected_tokens} more would be over {self._limits.max_queue_tokens}",
                retry_after_s=self._retry_after_s(),
            )
        ticket = Ticket(self, num_prompts=num_prompts, expected_tokens=expected_tokens)
        ticket.fair_end = self._fair_time + expected_tokens
        self._tickets[ticket] = None
        self._sharing.add(ticket)
        self._meters.waiting.inc()
        return ticket

    def arrived(self, ticket: Ticket) -> None:
        """Let new prompts of a ticket take part."""
        if ticket in self._tickets:
            # Equal shares may have been through with what was expected.
            self._sharing.add(ticket)
        self._show_queue()
        self._changed.set()

    async def wait(self, ticket: Ticket) -> list[float]:
        """Wait for a ticket's scores until its deadline."""
        spent_s = time.perf_counter() - ticket.admitted_at
        await asyncio.wait({ticket.done}, timeout=self._limits.deadline_s - spent_s)
        if not ticket.done.done():
            self._meters.rejected.labels("deadline").inc()
            raise BusyError(
                f"{ticket.num_scored} of {ticket.num_prompts} pairs were scored within {self._limits.deadline_s:g} s: "
                f"{self.queue_tokens} tokens wait",
                retry_after_s=self._retry_after_s(),
            )
        return ticket.done.result()

    def forget(self, ticket: Ticket) -> None:
        """Take a ticket out, answered or not."""
        if ticket not in self._tickets:
            return
        del self._tickets[ticket]
        if ticket.num_scored < ticket.num_prompts:
            self._sharing.discard(ticket)
        ticket.waiting.clear()
        ticket.waiting_tokens = 0
        ticket.done.cancel()
        if ticket.began_at is None:
            self._meters.waiting.dec()
        else:
            self._meters.running.dec()
            self._meters.inference_s.observe(time.perf_counter() - ticket.began_at)
        self._show_queue()

    async def aclose(self) -> None:
        """Give every request that is left an error, and start no further calls."""
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for ticket in self._tickets:
            ticket.fail(_closing())

    def _show_queue(self) -> None:
        self._meters.queue_tokens.set(self.queue_tokens)

    def _retry_after_s(self) -> int:
        return max(1, min(60, math.ceil(self._expected_s(self.queue_tokens))))

    def _expected_s(self, num_tokens: float) -> float:
        """Return what the engine is expected to take for tokens; 0 where it has done nothing yet."""
        return num_tokens * self._spent_s / self._spent_tokens if self._spent_tokens else 0.0

    async def _run(self) -> None:
        """Start calls, as many as the engine is to have."""
        async with asyncio.TaskGroup() as calls:
            while True:
                self._changed.clear()
                while self._is_wanted() and (call := self._take()):
                    self._running += 1
                    calls.create_task(self._score(call))
                await self._changed.wait()

    def _is_wanted(self) -> bool:
        """Tell whether the engine is to have another call, if there are prompts for one."""
        if self._running < (2 if self._queues_calls else 1):
            return True
        # Prompts that would not fill a pass rather wait for others: a pass of few takes longer than they add to one.
        waiting = sum(ticket.waiting_tokens for ticket in self._tickets)
        all_s = self._expected_s((self._running + 1) * self._pass_tokens)
        return self._queues_calls and waiting >= self._pass_tokens and 0 < all_s <= self._wait_s

    async def _score(self, call: _Call) -> None:
        """Run one call."""
        started = time.perf_counter()
        ids = [prompt.ids for _, prompt in call]
        try:
            loop = asyncio.get_running_loop()
            scores = await loop.run_in_executor(self._threads, self._engine.score, ids)
            if len(scores) != len(call):
                raise AssertionError(f"{len(call)} prompts, but {len(scores)} scores")
        except Exception as error:
            self._failures += 1
            self._meters.engine_failures.inc()
            logger.error("the engine failed on %d prompts", len(call), exc_info=error)
            failure = EngineFailedError(f"the engine failed: {type(error).__name__}: {error}")
            for ticket in _unique(ticket for ticket, _ in call):
                ticket.fail(failure)
                self.forget(ticket)
        else:
            self._failures = 0
            self._count(call, started)
            for (ticket, prompt), score in zip(call, scores, strict=True):
                ticket.settle(prompt, score)
        finally:
            self._running -= 1
            self._changed.set()

    def _take(self) -> _Call:
        """Take the prompts whose turn it is, as many as one pass takes."""
        call: _Call = []
        num_tokens = 0
        waiting = (ticket for ticket in self._tickets if ticket.waiting)
        for ticket in sorted(waiting, key=lambda ticket: ticket.fair_end):
            before = num_tokens
            while ticket.waiting:
                size = len(ticket.waiting[0].ids)
                if call and num_tokens + size > self._pass_tokens:
                    break
                call.append((ticket, ticket.waiting.popleft()))
                num_tokens += size
            ticket.waiting_tokens -= num_tokens - before
            if ticket.waiting:
                break
        self._share(num_tokens)
        self._begin(_unique(ticket for ticket, _ in call))
        self._show_queue()
        return call

    def _share(self, num_tokens: float) -> None:
        """Move the fair time on by a call, as if all who share the engine had equal parts of it."""
        ends = sorted(self._sharing, key=lambda ticket: ticket.fair_end)
        for place, ticket in enumerate(ends):
            left = len(ends) - place
            needed = max(0.0, ticket.fair_end - self._fair_time) * left
            if needed > num_tokens:
                self._fair_time += num_tokens / left
                return
            num_tokens -= needed
            self._fair_time = max(self._fair_time, ticket.fair_end)
            self._sharing.remove(ticket)

    def _begin(self, tickets: Iterable[Ticket]) -> None:
        now = time.perf_counter()
        for ticket in tickets:
            if ticket.began_at is None and ticket in self._tickets:
                ticket.began_at = now
                self._meters.queue_s.observe(now - ticket.admitted_at)
                self._meters.waiting.dec()
                self._meters.running.inc()

    def _count(self, call: _Call, started: float) -> None:
        num_tokens = sum(len(prompt.ids) for _, prompt in call)
        # Until the call before it had its scores, the engine was busy with that one.
        now = time.perf_counter()
        elapsed_s = now - max(started, self._last_end)
        self._last_end = now
        self._meters.batch_tokens.observe(num_tokens)
        self._meters.pairs.inc(len(call))
        self._meters.prompt_tokens.inc(num_tokens)
        self._meters.engine_s.inc(elapsed_s)
        # Two calls may end at once: each alone says nothing of the speed.
        self._spent_tokens = _MEMORY * self._spent_tokens + num_tokens
        self._spent_s = _MEMORY * self._spent_s + elapsed_s


def _unique(tickets: Iterable[Ticket]) -> list[Ticket]:
    return list(dict.fromkeys(tickets))


def _closing() -> UnavailableError:
    return UnavailableError("the scorer is shutting down")
