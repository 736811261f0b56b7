"""What the routes share: the model that is loaded, proved and served, its threads, and the way of a request.

Loading and scoring run in the engine's threads, parsing and tokenising in the text thread, a part of each request in
turn; the event loop does neither.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeVar

from starlette.requests import Request

from tevatron.core.errors import (
    BusyError,
    ContractError,
    InputError,
    PairError,
    TevatronError,
    UnavailableError,
)
from tevatron.core.prompts import Pair, Rendered, Renderer
from tevatron.scorer.served import Served
from tevatron.scorer.server.batching import Batcher, Limits, NotFiniteError, Ticket
from tevatron.scorer.server.meters import Meters

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")

_CLIENT_POLL_S = 0.5
_WAIT_S = 0.2
"""What a request may wait for before its turn: the calls that the engine has, where two do not take longer."""
_PAIRS_AT_ONCE = 64
"""Pairs of one request that are rendered before it is another's turn."""
_CHARACTERS_A_TOKEN = 4
"""Of a guess at what a text that is not rendered yet will take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server behaves, whatever it serves."""

    token: str | None = None
    """Bearer token that every request but a health probe must carry."""
    max_body_bytes: int = 64 * 2**20
    max_queue_tokens: int = 4 * 2**20
    deadline_s: float = 600.0
    """After which a request that has no answer yet is told to come again."""
    max_requests: int = 256
    """Requests in flight."""


class Scored(NamedTuple):
    """One pair's score, and what was scored."""

    score: float
    num_tokens: int
    truncated_tokens: int


class NotFiniteScoreError(InputError):
    """The model gives no number for a pair."""

    code = "not_finite"


class UnknownTokenError(InputError):
    """The tokenizer gives an id that the model has no embedding for."""

    code = "unknown_token"


class StartingError(UnavailableError):
    """The model is not loaded yet."""

    code = "starting"


class RefusedError(UnavailableError):
    """The model is not what its contract says; this server will never score."""

    code = ContractError.code


class BrokenError(UnavailableError):
    """The engine fails again and again."""

    code = "engine_failed"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Service:
    """The served model and, while the server runs, its threads."""

    def __init__(
        self,
        load: Callable[[], Served],
        options: ServerOptions,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.options = options
        self.meters = Meters()
        self._load = load
        self._on_failure = on_failure
        self._served: Served | None = None
        self._batcher: Batcher | None = None
        self._refusal: str | None = None
        self._requests = 0
        # Threads are made as they are needed: an engine that takes one call at a time has one.
        self._engine_threads = ThreadPoolExecutor(thread_name_prefix="engine")
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._loading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to load; requests are told so meanwhile."""
        self._loading = asyncio.create_task(self._load_and_serve(), name="load")

    async def stop(self) -> None:
        """Answer what is left with an error, and end the threads. A model that is being loaded is not waited for."""
        if self._loading is not None:
            self._loading.cancel()
        if self._batcher is not None:
            await self._batcher.aclose()
            await asyncio.to_thread(self._engine_threads.shutdown)
        self._engine_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._text_thread.shutdown)

    @property
    def served(self) -> Served:
        """What is served; an `UnavailableError` where nothing is, or nothing yet."""
        if self._refusal is not None:
            raise RefusedError(self._refusal)
        if self._served is None or self._batcher is None:
            raise StartingError("the model is being loaded")
        return self._served

    def check_ready(self) -> None:
        """Raise an `UnavailableError` that says why no pairs are scored."""
        _ = self.served
        assert self._batcher is not None, "there is one as soon as something is served"
        if self._batcher.is_broken:
            # Requests are let in none the less: the next pass that works ends this.
            raise BrokenError("the engine fails")

    async def parse(self, request: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Read the body and parse it in the text thread."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise UnsupportedMediaTypeError(
                f"expected Content-Type: application/json, got {media_type or 'none'!r}"
            )
        body = await request.body()
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, parse, body)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request; `BusyError` where there are too many."""
        if self._requests >= self.options.max_requests:
            self.meters.rejected.labels("too_many_requests").inc()
            raise BusyError(f"{self.options.max_requests} requests are in flight")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def score(
        self,
        pairs: Sequence[Pair],
        request: Request,
        *,
        name: Callable[[int], str],
        max_text_tokens: int | None = None,
    ) -> list[Scored]:
        """Return each pair's score, in order; `name` says in errors which pair is meant."""
        renderer = self.served.renderer
        assert self._batcher is not None, "there is one as soon as something is served"
        expected = sum(
            min(renderer.max_length, 1 + len(pair.query + pair.text) // _CHARACTERS_A_TOKEN)
            for pair in pairs
        )
        ticket = self._batcher.admit(num_prompts=len(pairs), expected_tokens=expected)
        try:
            rendering = _Rendering(
                renderer, name, max_text_tokens, self.served.engine.info().vocab_size
            )
            work = self._render_and_wait(pairs, ticket, rendering)
            rendered, scores = await _unless_gone(work, request)
        except NotFiniteError as error:
            raise NotFiniteScoreError(
                f"{name(error.index)} scores {error.score}, which is no finite number"
            ) from error
        finally:
            ticket.close()
        self._count_truncated(rendered)
        return [
            Scored(score, len(one.ids), one.truncated_tokens)
            for one, score in zip(rendered, scores, strict=True)
        ]

    async def _render_and_wait(
        self, pairs: Sequence[Pair], ticket: Ticket, rendering: _Rendering
    ) -> tuple[list[Rendered], list[float]]:
        """Render part by part, so that the engine begins with the first, and other requests have their turn."""
        loop = asyncio.get_running_loop()
        rendered: list[Rendered] = []
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            if ticket.done.done():
                break  # It failed already.
            part = await loop.run_in_executor(
                self._text_thread, rendering.render, pairs[start : start + _PAIRS_AT_ONCE], start
            )
            rendered += part
            ticket.add([one.ids for one in part])
        self.meters.tokenization_s.observe(perf_counter() - ticket.admitted_at)
        return rendered, await ticket.scores()

    def _count_truncated(self, rendered: Sequence[Rendered]) -> None:
        cut = [one.truncated_tokens for one in rendered if one.truncated_tokens]
        self.meters.truncated_pairs.inc(len(cut))
        self.meters.truncated_tokens.inc(sum(cut))

    async def _load_and_serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            served = await loop.run_in_executor(self._engine_threads, self._load)
        except ContractError as error:
            # A checkpoint that is not what it says is seen by whoever asks for readiness, not only in a log.
            logger.error("not ready: %s", error)
            self._refusal = str(error)
            return
        except Exception as error:  # noqa: BLE001  process border: the libraries below raise anything; it ends the server
            self._on_failure(error)
            return
        # A full collection walks over everything that torch and the model have made, and everybody waits.
        gc.collect()
        gc.freeze()
        self._served = served
        info = served.engine.info()
        self._batcher = Batcher(
            served.engine,
            threads=self._engine_threads,
            pass_tokens=info.max_batch_tokens,
            queues_calls=info.queues_calls,
            wait_s=_WAIT_S,
            limits=Limits(
                max_queue_tokens=self.options.max_queue_tokens, deadline_s=self.options.deadline_s
            ),
            meters=self.meters,
        )
        self.meters.describe(served.info)
        logger.info("serving %s: %s", served.info.model_name_or_path, served.info.model_dump_json())


class UnsupportedMediaTypeError(TevatronError):
    """The body is not declared as JSON."""

    status_code = 415
    code = "unsupported_media_type"


class _Rendering(NamedTuple):
    renderer: Renderer
    name: Callable[[int], str]
    max_text_tokens: int | None
    vocab_size: int | None

    def render(self, pairs: Sequence[Pair], start: int) -> list[Rendered]:
        """Render in the text thread; the first pair that no prompt can be made of, or with an unknown token, is named."""
        cut = [0] * len(pairs)
        if self.max_text_tokens is not None:
            both = [self.renderer.cut_text(pair, max_tokens=self.max_text_tokens) for pair in pairs]
            pairs, cut = [pair for pair, _ in both], [number for _, number in both]
        try:
            rendered = self.renderer.render_all(pairs)
        except PairError:
            for place, pair in enumerate(pairs):
                try:
                    self.renderer.render(pair)
                except PairError as error:
                    raise type(error)(f"{self.name(start + place)}: {error}") from error
            raise
        for place, one in enumerate(rendered):
            if self.vocab_size is not None and max(one.ids) >= self.vocab_size:
                raise UnknownTokenError(
                    f"{self.name(start + place)}: the tokenizer gives id {max(one.ids)}, the model knows "
                    f"{self.vocab_size} ids"
                )
        return [
            one._replace(truncated_tokens=one.truncated_tokens + number)
            for one, number in zip(rendered, cut, strict=True)
        ]


async def _unless_gone(work: Awaitable[Parsed], request: Request) -> Parsed:
    """Return the result; end the work once the client has gone."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_CLIENT_POLL_S)
            if not task.done() and await request.is_disconnected():
                raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
