"""What endpoints are given: the settings, a session that is one transaction, a page's bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from sqlalchemy.orm import Session

from tevatron.api.metrics import HttpMetrics
from tevatron.core.settings import Settings
from tevatron.core.store.session import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parts of one running application."""

    settings: Settings
    sessions: Sessions
    metrics: HttpMetrics
    closing: threading.Event = field(default_factory=threading.Event)
    """Set when the server begins to stop: event streams end, so that it need not wait for them."""


def context_of(request: Request) -> Context:
    """Return the application's parts."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


CurrentContext = Annotated[Context, Depends(context_of)]


def open_session(context: CurrentContext) -> Iterator[Session]:
    """Yield a session; the transaction commits before the answer is sent."""
    with context.sessions.begin() as session:
        yield session


# With the default scope the commit would come after the answer, and a client could be told of a job that is not there.
CurrentSession = Annotated[Session, Depends(open_session, scope="function")]

ResourceRef = Annotated[
    str,
    Path(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Id or name.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBounds:
    """Which part of a list."""

    limit: int
    after: str | None


def page_bounds(
    limit: Annotated[int, Query(ge=1, le=100, description="Entries a page.")] = 50,
    after: Annotated[
        str | None, Query(min_length=1, max_length=4000, description="`next` of the page before.")
    ] = None,
) -> PageBounds:
    """Read the bounds from the query."""
    return PageBounds(limit=limit, after=after)


CurrentPage = Annotated[PageBounds, Depends(page_bounds)]
