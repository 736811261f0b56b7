"""The dashboard: pages rendered here out of what the REST routes return. Reading needs no JavaScript; it makes them live."""

from __future__ import annotations

from fastapi import APIRouter

from tevatron.api.dashboard import checkpoints, evaluations, jobs, login, scorers, submit
from tevatron.api.dashboard.static_files import static_routes

__all__ = ["ROUTERS", "install"]

ROUTERS = (
    login.entry,
    login.router,
    submit.router,
    jobs.router,
    checkpoints.router,
    scorers.router,
    evaluations.router,
    login.rest,
)
"""In the order in which a path is looked for."""


def install(router: APIRouter) -> None:
    """Add the pages to a router."""
    router.routes.extend(static_routes())
    for pages in ROUTERS:
        router.include_router(pages)
