"""The application: routers, middlewares and their parts, put together. Nothing here runs at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import anyio.to_thread
from fastapi import APIRouter, FastAPI
from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from tevatron.api import dashboard, health, openapi, problems
from tevatron.api.checkpoints.endpoints import router as checkpoints
from tevatron.api.context import Context
from tevatron.api.dashboard.headers import PageHeaders
from tevatron.api.datasets.endpoints import router as datasets
from tevatron.api.datasets.upload import remove_stale_parts
from tevatron.api.evaluations.endpoints import router as evaluations
from tevatron.api.guard import BodyGuard
from tevatron.api.jobs.endpoints import router as jobs
from tevatron.api.jobs.history import router as history
from tevatron.api.metrics import HttpMetrics
from tevatron.api.models.endpoints import router as models
from tevatron.api.scorers.endpoints import router as scorers
from tevatron.api.security import Authentication
from tevatron.api.trace import RequestTrace
from tevatron.api.webhooks.endpoints import router as webhooks
from tevatron.core.settings import Settings
from tevatron.core.store.session import make_sessions

API_VERSION = "1"

NUM_THREADS = 16
"""Requests that run at once; more than the pool has connections would only wait for one."""


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """Return the API on this database."""
    sessions = make_sessions(engine)
    context = Context(settings=settings, sessions=sessions, metrics=HttpMetrics())
    app = FastAPI(
        title="Tevatron",
        version=API_VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=_lifespan,
        routes=_routes(),
    )
    app.state.context = context
    problems.install(app)
    openapi.install(app)
    # The last one added is the outermost.
    app.add_middleware(Authentication, sessions=sessions, bind_host=settings.api_host)
    app.add_middleware(
        BodyGuard,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
    )
    app.add_middleware(PageHeaders)
    app.add_middleware(RequestTrace, metrics=context.metrics)
    return app


@cache
def _routes() -> list[BaseRoute]:
    # One list for all applications of a process: FastAPI reads the signatures of its functions at the first requests.
    router = APIRouter()
    for included in (
        health.router,
        jobs,
        history,
        checkpoints,
        models,
        datasets,
        scorers,
        evaluations,
        webhooks,
    ):
        router.include_router(included)
    dashboard.install(router)
    return router.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context = app.state.context
    assert isinstance(context, Context)
    anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
    await run_in_threadpool(remove_stale_parts, context.settings.data)
    yield
    context.closing.set()
