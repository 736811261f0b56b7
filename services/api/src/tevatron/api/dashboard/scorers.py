"""Scorers: what is served where, how close it comes to its contract, and how busy it is."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from tevatron.api.context import CurrentContext, CurrentSession, ResourceRef
from tevatron.api.dashboard.jobs import PAGE_LIMIT, Cursor
from tevatron.api.dashboard.page import page_router, redirect, render
from tevatron.api.scorers.endpoints import delete_scorer
from tevatron.api.security import PAGES, CurrentCaller
from tevatron.core.store.models import Scorer, ScorerState
from tevatron.core.store.replicas import Replicas
from tevatron.core.store.scorers import LIVE_STATES, ScorerRepository

router = page_router()
log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1.0
MAX_METRICS_BYTES = 2**20
LOAD = {
    "tevatron_scorer_num_requests_running": "requests in passes",
    "tevatron_scorer_num_requests_waiting": "requests that wait",
    "tevatron_scorer_queue_tokens": "tokens that wait",
    "tevatron_scorer_pairs_total": "pairs scored",
    "tevatron_scorer_engine_seconds_total": "seconds in the engine",
}
"""What a scorer measures of its load, and how a page calls it."""


@router.get("/scorers")
def show_scorers(
    request: Request, caller: CurrentCaller, session: CurrentSession, after: Cursor = ""
) -> Response:
    """Show a page of scorers, newest first."""
    repository = ScorerRepository(session)
    page = repository.list_page(key_id=caller.scope, cursor=after or None, limit=PAGE_LIMIT)
    scorers = repository.replicas([row.id for row in page.items])
    values = {"scorers": scorers, "next": page.next_cursor, "after": after}
    return render(request, "scorers.html", values)


@router.get("/scorers/{ref}")
def show_scorer(
    request: Request, ref: ResourceRef, caller: CurrentCaller, context: CurrentContext
) -> Response:
    """Show one scorer; it is asked for its load now."""
    with context.sessions.begin() as session:
        repository = ScorerRepository(session)
        [scorer] = repository.replicas([repository.get(ref, key_id=caller.scope).id])
    # No session is open while it is waited for.
    values = {
        "scorer": scorer,
        "errors": dict.fromkeys(row.error for row in scorer.rows if row.error),
        "load": _load(scorer),
        "can_release": scorer.best.state in LIVE_STATES
        and (caller.is_admin or not scorer.first.external),
    }
    return render(request, "scorer.html", values)


@router.post("/scorers/{ref}/release")
def release(ref: ResourceRef, caller: CurrentCaller, session: CurrentSession) -> Response:
    """Let the scorer go."""
    return redirect(f"{PAGES}/scorers/{delete_scorer(ref, caller, session).id}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A scorer's answer must not send the request, and its token, elsewhere."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def _load(scorer: Replicas) -> Mapping[str, float]:
    """Return what a scorer's ready replicas measure together; nothing where none answers in time."""
    total: dict[str, float] = {}
    # At once: a page waits for the slowest, not for their sum.
    with ThreadPoolExecutor(max_workers=len(scorer.rows)) as pool:
        for load in pool.map(_load_of, scorer.rows):
            for name, value in load.items():
                total[name] = total.get(name, 0.0) + value
    return total


def _load_of(row: Scorer) -> Mapping[str, float]:
    if row.state is not ScorerState.READY or row.url is None:
        return {}
    asked = urllib.request.Request(f"{row.url.rstrip('/')}/metrics")
    if row.token is not None:
        asked.add_header("Authorization", f"Bearer {row.token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(asked, timeout=LOAD_TIMEOUT_S) as answer:
            text = answer.read(MAX_METRICS_BYTES).decode("utf-8", "replace")
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (OSError, ValueError) as error:
        log.info("scorer %s does not tell its load: %s", row.id, error)
        return {}
    return {LOAD[name]: samples[name] for name in LOAD if name in samples}
