"""Continuous batching: prompts of all requests share forward passes of at most so many tokens.

One task takes the oldest waiting prompts, packs them by token budget and runs one pass at a time in the model's own
thread; the event loop stays free. The queue is bounded in tokens, and a request that has not begun in time is told to
come again. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tevatron.core.errors import BusyError, InputError, TevatronError, UnavailableError
from tevatron.core.packing import pack
from tevatron.scorer.engines import Engine
from tevatron.scorer.server.counters import Counters

logger = logging.getLogger(__name__)

_WINDOW_PASSES = 4
"""Passes whose prompts are packed together; more would let new prompts overtake old ones for longer."""
_FAILURES_UNTIL_BROKEN = 3


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
    max_wait_s: float
    """Longest wait for a request's first pass."""


@dataclass(slots=True)
class _Request:
    num_prompts: int
    done: asyncio.Future[list[float]]
    scores: dict[int, float] = field(default_factory=dict)
    begun: bool = False


@dataclass(slots=True)
class _Prompt:
    request: _Request
    index: int
    ids: Sequence[int]


class Batcher:
    """Owns the queue and the thread in which the engine runs."""

    def __init__(
        self, engine: Engine, *, max_batch_tokens: int, limits: Limits, counters: Counters
    ) -> None:
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._limits = limits
        self._counters = counters
        self._requests: dict[int, _Request] = {}
        """Those that have no answer yet, by identity."""
        self._waiting: deque[_Prompt] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._tokens_per_s = 0.0
        self._failures = 0
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="batcher")

    @property
    def is_broken(self) -> bool:
        """Whether the last passes all failed, or the batcher itself has ended."""
        return self._failures >= _FAILURES_UNTIL_BROKEN or self._task.done()

    @property
    def queue_tokens(self) -> int:
        """Tokens that wait."""
        return self._counters.queue_tokens

    async def score(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt; `BusyError` where too many wait already or the wait gets too long."""
        num_tokens = sum(len(ids) for ids in prompts)
        self._admit(num_tokens)
        request = _Request(len(prompts), asyncio.get_running_loop().create_future())
        self._requests[id(request)] = request
        self._waiting.extend(_Prompt(request, index, ids) for index, ids in enumerate(prompts))
        self._counters.queue_tokens += num_tokens
        self._arrived.set()
        try:
            await asyncio.wait({request.done}, timeout=self._limits.max_wait_s)
            if not request.done.done() and not request.begun:
                raise BusyError(
                    f"the request waited {self._limits.max_wait_s:g} s and did not begin: {self.queue_tokens} tokens wait",
                    retry_after_s=self._retry_after_s(),
                )
            return await request.done
        finally:
            # Also when the client is gone: what has not run yet is not run any more.
            request.done.cancel()
            self._forget(request)

    async def aclose(self) -> None:
        """Give every request that is left an error, and wait for the pass that runs."""
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail(self._requests.values(), _closing())
        await asyncio.to_thread(self._thread.shutdown)

    def _admit(self, num_tokens: int) -> None:
        if self._closed:
            raise _closing()
        waiting = self.queue_tokens
        if waiting and waiting + num_tokens > self._limits.max_queue_tokens:
            raise BusyError(
                f"{waiting} tokens wait, {num_tokens} more would be over {self._limits.max_queue_tokens}",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        if not self._tokens_per_s:
            return 1
        return max(1, min(60, math.ceil(self.queue_tokens / self._tokens_per_s)))

    def _forget(self, request: _Request) -> None:
        del self._requests[id(request)]
        if len(request.scores) == request.num_prompts:
            return
        kept = deque(prompt for prompt in self._waiting if prompt.request is not request)
        self._counters.queue_tokens = sum(len(prompt.ids) for prompt in kept)
        self._waiting = kept

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take()
            started = time.perf_counter()
            try:
                scores = await loop.run_in_executor(
                    self._thread, self._engine.score, [prompt.ids for prompt in batch]
                )
            except Exception as error:
                self._failures += 1
                logger.error("the engine failed on %d prompts", len(batch), exc_info=error)
                failure = EngineFailedError(f"the engine failed: {type(error).__name__}: {error}")
                self._fail(_unique(batch), failure)
            else:
                self._failures = 0
                self._count(batch, time.perf_counter() - started)
                self._settle(batch, scores)

    def _take(self) -> list[_Prompt]:
        """Take the pass that holds the oldest prompt, out of the window packed by token budget."""
        window: list[_Prompt] = []
        budget = _WINDOW_PASSES * self._max_batch_tokens
        while self._waiting and (not window or budget >= len(self._waiting[0].ids)):
            window.append(self._waiting.popleft())
            budget -= len(window[-1].ids)
        bins = pack([len(prompt.ids) for prompt in window], max_tokens=self._max_batch_tokens)
        # Bins come in the order of their first index: the first holds the oldest prompt.
        chosen = set(bins[0])
        self._waiting.extendleft(
            prompt for place, prompt in reversed(list(enumerate(window))) if place not in chosen
        )
        batch = [window[place] for place in bins[0]]
        self._counters.queue_tokens -= sum(len(prompt.ids) for prompt in batch)
        for prompt in batch:
            prompt.request.begun = True
        return batch

    def _settle(self, batch: Sequence[_Prompt], scores: Sequence[float]) -> None:
        for prompt, score in zip(batch, scores, strict=True):
            request = prompt.request
            if not math.isfinite(score):
                self._fail([request], NotFiniteError(prompt.index, score))
                continue
            request.scores[prompt.index] = score
            if len(request.scores) == request.num_prompts and not request.done.done():
                request.done.set_result([request.scores[at] for at in range(request.num_prompts)])

    def _fail(self, requests: Iterable[_Request], error: Exception) -> None:
        for request in requests:
            if not request.done.done():
                request.done.set_exception(error)

    def _count(self, batch: Sequence[_Prompt], elapsed_s: float) -> None:
        num_tokens = sum(len(prompt.ids) for prompt in batch)
        self._counters.passes += 1
        self._counters.pairs += len(batch)
        self._counters.tokens += num_tokens
        self._counters.busy_s += elapsed_s
        speed = num_tokens / max(elapsed_s, 1e-6)
        self._tokens_per_s = 0.8 * self._tokens_per_s + 0.2 * speed if self._tokens_per_s else speed


def _unique(prompts: Iterable[_Prompt]) -> list[_Request]:
    return list({id(prompt.request): prompt.request for prompt in prompts}.values())


def _closing() -> UnavailableError:
    return UnavailableError("the scorer is shutting down")
