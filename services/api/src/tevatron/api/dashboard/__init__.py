"""The dashboard: pages rendered here out of what the REST routes return. Reading needs no JavaScript; it makes them live."""

from __future__ import annotations

from fastapi import FastAPI

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


def install(app: FastAPI) -> None:
    """Add the pages to an application."""
    app.router.routes.extend(static_routes())
    for router in ROUTERS:
        app.include_router(router)
