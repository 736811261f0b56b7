"""The HTTP interface of one engine: `/score`, the rerank paths, and what says how the server is.

The server listens while the model is loaded and proved, and says so; a model that is not what its contract says never
scores, and `/ready` and `/health` say why.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.errors import TevatronError, UnavailableError
from tevatron.scorer.served import Served
from tevatron.scorer.server.answers import openapi, refusals
from tevatron.scorer.server.guard import Guard
from tevatron.scorer.server.problems import problem, problem_of
from tevatron.scorer.server.rerank import add_rerank
from tevatron.scorer.server.score import add_score
from tevatron.scorer.server.service import ServerOptions, Service, StartingError

logger = logging.getLogger(__name__)


def _log_failure(error: BaseException) -> None:
    logger.error("the model cannot be served", exc_info=error)


def create_app(
    load: Callable[[], Served],
    options: ServerOptions | None = None,
    *,
    on_failure: Callable[[BaseException], None] = _log_failure,
) -> FastAPI:
    """Return the application; its lifespan calls `load` in the engine's thread.

    Args:
        on_failure: Told where `load` raises anything but a `ContractError`; the server is of no use then.
    """
    options = options or ServerOptions()
    service = Service(load, options, on_failure=on_failure)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="Tevatron scorer", version="1", lifespan=lifespan)
    app.add_middleware(Guard, token=options.token, max_body_bytes=options.max_body_bytes)
    app.add_exception_handler(TevatronError, _tevatron_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    add_score(app, service)
    add_rerank(app, service)
    _add_probes(app, service)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]  # the way that FastAPI documents
    return app


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/info", response_model=ScorerInfo, responses=refusals(401, 503))
    async def info() -> Response:
        """Say what is served, and how closely it reproduces its contract."""
        served = service.served
        return Response(served.info.model_dump_json(), media_type="application/json")

    @app.get("/health", responses=refusals(503))
    async def health() -> dict[str, str]:
        """Say that the process works or still loads; 503 with the reason once it must be replaced."""
        try:
            service.check_ready()
        except StartingError:
            return {"status": "starting"}
        return {"status": "ok"}

    @app.get("/ready", responses=refusals(503))
    async def ready() -> Response:
        """Say that pairs are scored; 503 with the reason where they are not."""
        service.check_ready()
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=refusals(401))
    async def metrics() -> Response:
        """Return counters in Prometheus' text form."""
        try:
            service.check_ready()
            service.meters.ready.set(1)
        except UnavailableError:
            service.meters.ready.set(0)
        return Response(service.meters.render(), media_type="text/plain; version=0.0.4")


async def _tevatron_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TevatronError)
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
