"""Scorers: what is served where, how close it comes to its contract, and how busy it is."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Mapping

from fastapi import Request
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from tevatron.api.context import CurrentContext, CurrentSession, ResourceRef
from tevatron.api.dashboard.jobs import PAGE_LIMIT, Cursor
from tevatron.api.dashboard.page import page_router, redirect, render
from tevatron.api.scorers.endpoints import delete_scorer
from tevatron.api.security import PAGES, CurrentCaller
from tevatron.core.store.models import Scorer, ScorerState
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
    page = ScorerRepository(session).list_page(
        key_id=caller.scope, cursor=after or None, limit=PAGE_LIMIT
    )
    values = {"scorers": page.items, "next": page.next_cursor, "after": after}
    return render(request, "scorers.html", values)


@router.get("/scorers/{ref}")
def show_scorer(
    request: Request, ref: ResourceRef, caller: CurrentCaller, context: CurrentContext
) -> Response:
    """Show one scorer; it is asked for its load now."""
    with context.sessions.begin() as session:
        scorer = ScorerRepository(session).get(ref, key_id=caller.scope)
    # No session is open while it is waited for.
    values = {
        "scorer": scorer,
        "load": _load(scorer),
        "can_release": scorer.state in LIVE_STATES and (caller.is_admin or not scorer.external),
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


def _load(scorer: Scorer) -> Mapping[str, float] | None:
    """Return what a ready scorer measures, None where it does not answer in time."""
    if scorer.state is not ScorerState.READY or scorer.url is None:
        return None
    asked = urllib.request.Request(f"{scorer.url.rstrip('/')}/metrics")
    if scorer.token is not None:
        asked.add_header("Authorization", f"Bearer {scorer.token}")
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
        log.info("scorer %s does not tell its load: %s", scorer.id, error)
        return None
    return {LOAD[name]: samples[name] for name in LOAD if name in samples}
