"""The HTTP interface of one proved engine: `/score` in the reference's form, `/info`, `/health`, `/ready`, `/metrics`.

Parsing and tokenising run in one thread, the model in another; the event loop does neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tevatron.core.contracts.checkpoint import check_request_prefixes
from tevatron.core.contracts.scores import Candidate, Score, ScoreRequest, ScoreResponse
from tevatron.core.errors import BusyError, InputError, QueryTooLongError, TevatronError
from tevatron.core.prompts import Pair, Rendered, Renderer
from tevatron.scorer.served import Served
from tevatron.scorer.server.batching import Batcher, Limits, NotFiniteError
from tevatron.scorer.server.counters import Counters
from tevatron.scorer.server.guard import Guard
from tevatron.scorer.server.problems import problem, problem_of

logger = logging.getLogger(__name__)

_CLIENT_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server behaves, whatever it serves."""

    token: str | None = None
    """Bearer token that every request but a health probe must carry."""
    max_body_bytes: int = 64 * 2**20
    max_queue_tokens: int = 4 * 2**20
    max_wait_s: float = 300.0
    max_requests: int = 256
    """Requests in flight."""


class _Asked(NamedTuple):
    candidates: list[Candidate]
    prompts: list[Rendered]


class UnsupportedMediaTypeError(TevatronError):
    """The body is not declared as JSON."""

    status_code = 415
    code = "unsupported_media_type"


class _Service:
    """What the routes share: the served engine and, while the server runs, its threads."""

    def __init__(self, served: Served, options: ServerOptions) -> None:
        self.served = served
        self.options = options
        self.counters = Counters()
        self.batcher: Batcher | None = None
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    async def start(self) -> None:
        self.batcher = Batcher(
            self.served.engine,
            max_batch_tokens=self.served.max_batch_tokens,
            limits=Limits(
                max_queue_tokens=self.options.max_queue_tokens, max_wait_s=self.options.max_wait_s
            ),
            counters=self.counters,
        )

    async def stop(self) -> None:
        if self.batcher is not None:
            await self.batcher.aclose()
        self.batcher = None
        await asyncio.to_thread(self._text_thread.shutdown)

    async def score(self, request: Request) -> ScoreResponse:
        if self.counters.requests_in_flight >= self.options.max_requests:
            raise BusyError(f"{self.options.max_requests} requests are in flight")
        self.counters.requests_in_flight += 1
        try:
            body = await request.body()
            loop = asyncio.get_running_loop()
            asked = await loop.run_in_executor(self._text_thread, self._read, body)
            scores = await self._run(asked, request)
        finally:
            self.counters.requests_in_flight -= 1
        self.counters.truncated_pairs += sum(1 for one in asked.prompts if one.truncated_tokens)
        return _response(asked, scores)

    def _read(self, body: bytes) -> _Asked:
        """Parse and render in the text thread."""
        try:
            parsed = ScoreRequest.model_validate_json(body)
        except ValidationError as error:
            raise InputError(_first_fault(error)) from error
        renderer = self.served.renderer
        check_request_prefixes(
            renderer, query_prefix=parsed.query_prefix, passage_prefix=parsed.passage_prefix
        )
        return _Asked(parsed.candidates, _render(renderer, parsed.candidates))

    async def _run(self, asked: _Asked, request: Request) -> list[float]:
        assert self.batcher is not None, "the lifespan starts it"
        work = asyncio.ensure_future(self.batcher.score([one.ids for one in asked.prompts]))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_CLIENT_POLL_S)
                if not work.done() and await request.is_disconnected():
                    raise _ClientGoneError
            return work.result()
        except NotFiniteError as error:
            pair = asked.candidates[error.index]
            raise NotFiniteScoreError(
                f"query '{pair.query_id}', document '{pair.docid}' scores {error.score}, which is no finite number"
            ) from error
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class NotFiniteScoreError(InputError):
    """The model gives no number for a pair."""

    code = "not_finite"


class _ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def _render(renderer: Renderer, candidates: list[Candidate]) -> list[Rendered]:
    pairs = [Pair(query=one.query, title=one.title, text=one.text) for one in candidates]
    try:
        return renderer.render_all(pairs)
    except QueryTooLongError:
        for one, pair in zip(candidates, pairs, strict=True):
            try:
                renderer.render(pair)
            except QueryTooLongError as error:
                raise QueryTooLongError(f"query_id '{one.query_id}': {error}") from error
        raise


def _response(asked: _Asked, scores: list[float]) -> ScoreResponse:
    return ScoreResponse(
        scores=[
            Score(
                query_id=one.query_id,
                docid=one.docid,
                score=score,
                truncated_tokens=prompt.truncated_tokens,
            )
            for one, prompt, score in zip(asked.candidates, asked.prompts, scores, strict=True)
        ]
    )


def _first_fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    first = faults[0]
    place = ".".join(str(part) for part in first["loc"]) or "body"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {first['msg']}{more}"


def create_app(served: Served, options: ServerOptions | None = None) -> FastAPI:
    """Return the application; its lifespan owns the threads, not the engine's loading."""
    options = options or ServerOptions()
    service = _Service(served, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="Tevatron scorer", version="1", lifespan=lifespan)
    app.add_middleware(Guard, token=options.token, max_body_bytes=options.max_body_bytes)
    app.add_exception_handler(TevatronError, _tevatron_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    _add_score(app, service)
    _add_probes(app, service)
    return app


def _add_score(app: FastAPI, service: _Service) -> None:
    schema = {"application/json": {"schema": ScoreRequest.model_json_schema()}}

    @app.post(
        "/score",
        response_model=ScoreResponse,
        openapi_extra={"requestBody": {"required": True, "content": schema}},
    )
    async def score(request: Request) -> Response:
        """Score pairs; the answer is in the order of the request."""
        status = 500
        try:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise UnsupportedMediaTypeError(
                    f"expected Content-Type: application/json, got {media_type or 'none'!r}"
                )
            answer = await service.score(request)
            status = 200
        except TevatronError as error:
            status = error.status_code
            raise
        except _ClientGoneError:
            # 499 as other servers write it; nobody reads it.
            status = 499
            return Response(status_code=status)
        finally:
            service.counters.requests[status] += 1
        return Response(answer.model_dump_json(), media_type="application/json")


def _add_probes(app: FastAPI, service: _Service) -> None:
    @app.get("/info")
    async def info() -> Response:
        """Say what is served, and how closely it reproduces its contract."""
        return Response(service.served.info.model_dump_json(), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Say whether pairs are scored; 503 once the engine has failed again and again."""
        if service.batcher is None or service.batcher.is_broken:
            return problem(503, "the engine fails", code="unavailable")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counters in Prometheus' text form."""
        return PlainTextResponse(service.counters.render(), media_type="text/plain; version=0.0.4")


async def _tevatron_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TevatronError)
    if error.status_code >= 500:
        logger.error("request failed: %s", error)
    return problem_of(error)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(
        error.status_code, f"http_{error.status_code}"
    )
    return problem(error.status_code, error.detail, code=code, headers=error.headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, so that the server logs its traceback.
    return problem(500, "an error on our side; the log has it", code="internal_error")
