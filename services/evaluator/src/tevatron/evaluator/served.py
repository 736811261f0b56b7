"""What a scorer serves, as far as it decides a score: asked, compared, and never taken for granted.

A scorer that is proved to keep a contract is known by the contract's hash; `GET /info` says it. One without (a plain
model, the reference's server) is known by what `/info` says and by its scores of the fixed probes, which differ with
the weights, the template and the truncation. Scores of two scorers go into one ranking only where these agree.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

import httpx
from pydantic import JsonValue

from tevatron.core.contracts.checkpoint import FP32_TOLERANCE
from tevatron.core.contracts.probes import PROBE_PAIRS
from tevatron.core.contracts.scores import Candidate, ScoreRequest
from tevatron.evaluator.answers import (
    ScorerRefusedError,
    checked_scores,
    detail_of,
    raise_if_refused,
)

DECIDING = (
    "contract_sha256",
    "prompt_template",
    "head",
    "yes_id",
    "no_id",
    "max_length",
    "dtype",
    "backend",
)
"""Fields of `/info` on which a score depends; the reference's server has some of them."""
_INFO_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
PROBE_QUERY_ID = "tevatron-probe"
# Two that match and do not, two with titles, and one that is longer than most limits.
_PROBES = [
    Candidate(
        query_id=PROBE_QUERY_ID,
        docid=str(place),
        query=pair.query,
        title=pair.title,
        text=pair.text,
    )
    for place, pair in enumerate((*PROBE_PAIRS[:4], PROBE_PAIRS[-2]))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one scorer serves."""

    url: str
    said: dict[str, JsonValue]
    """The deciding fields of `/info`; null where it does not say."""
    probe_scores: tuple[float, ...] | None
    """Of the fixed probes; None where a contract vouches for the scores."""

    @property
    def identity(self) -> str:
        """Say what decides a score besides the pair's texts, whatever the scorer's address."""
        probes = None if self.probe_scores is None else [round(s, 3) for s in self.probe_scores]
        return json.dumps({**self.said, "probe_scores": probes}, sort_keys=True)

    def difference(self, other: Served) -> str | None:
        """Say why the scores of the two cannot be compared; None where they can."""
        for name in DECIDING:
            own, others = self.said[name], other.said[name]
            if own != others:
                return f"{name} is {own!r} at {self.url} and {others!r} at {other.url}"
        if self.probe_scores is None or other.probe_scores is None:
            return None
        allowed = self._tolerance()
        for probe, own, others in zip(_PROBES, self.probe_scores, other.probe_scores, strict=True):
            if abs(own - others) > allowed:
                return (
                    f"the probe {probe.query!r} scores {own:.4f} at {self.url} and {others:.4f} at {other.url}, more "
                    f"than {allowed:.4f} apart"
                )
        return None

    def _tolerance(self) -> float:
        assert self.probe_scores is not None
        if self.said["dtype"] == "float32":
            return FP32_TOLERANCE
        return max(FP32_TOLERANCE, statistics.pstdev(self.probe_scores) / 2)


async def ask_served(client: httpx.AsyncClient, url: str) -> Served:
    """Ask a scorer what it serves; raises `httpx.HTTPStatusError` for 429 and 5xx, which may pass."""
    response = await client.get("/info", timeout=_INFO_TIMEOUT)
    info = _read_info(url, response)
    if not isinstance(info, dict) or not isinstance(info.get("prompt_template"), str):
        raise ScorerRefusedError(
            f"scorer {url} does not say what it serves: expected prompt_template in GET /info, got "
            f"{response.text[:200]!r}"
        )
    said = {name: info.get(name) for name in DECIDING}
    scores = None if said["contract_sha256"] else await _score_probes(client, url)
    return Served(url=url, said=said, probe_scores=scores)


async def _score_probes(client: httpx.AsyncClient, url: str) -> tuple[float, ...]:
    response = await client.post(
        "/score",
        content=ScoreRequest(candidates=_PROBES).model_dump_json(exclude_none=True),
        headers={"Content-Type": "application/json"},
    )
    if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        raise ScorerRefusedError(
            f"scorer {url} says nothing of a contract and finds {len(_PROBES)} probes too large: {detail_of(response)}"
        )
    if response.status_code != httpx.codes.OK:
        raise_if_refused(url, _PROBES, response)
        response.raise_for_status()
    return tuple(checked_scores(url, _PROBES, response))


def _read_info(url: str, response: httpx.Response) -> object:
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.status_code >= 500:
        response.raise_for_status()
    if response.status_code != httpx.codes.OK:
        raise ScorerRefusedError(
            f"scorer {url} answered {response.status_code} {detail_of(response)}: expected 200 from GET /info"
        )
    try:
        return response.json()
    except ValueError as error:
        raise ScorerRefusedError(
            f"scorer {url} answered {response.text[:200]!r}: expected JSON from GET /info"
        ) from error
