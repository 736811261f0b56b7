"""Wire types of `POST /score`, in the reference's form, and of a scorer's `/info`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from tevatron.core.contracts.jobs import Spec

Id = Annotated[str, Field(min_length=1, max_length=1000)]


class Candidate(Spec):
    """One pair to score."""

    query_id: Id
    docid: Id
    query: str
    text: str = ""
    title: str = ""


class ScoreRequest(Spec):
    """Body of `POST /score`; a prefix other than the contract's is refused."""

    candidates: list[Candidate] = Field(min_length=1, max_length=10_000)
    query_prefix: str | None = None
    passage_prefix: str | None = None


class Score(Spec):
    """One score: logit(yes) - logit(no), or the head's logit. `missing` is always false here: no sentinels."""

    query_id: str
    docid: str
    score: float = Field(allow_inf_nan=False)
    missing: bool = False
    truncated_tokens: int = 0
    """Passage tokens that did not fit."""


class ScoreResponse(Spec):
    """Answer of `POST /score`, in the order of the request."""

    scores: list[Score]


class ScorerInfo(Spec):
    """Answer of `GET /info`."""

    backend: str
    model_name_or_path: str
    prompt_template: str
    head: str
    yes_id: int | None
    no_id: int | None
    max_length: int
    dtype: str
    contract_sha256: str | None = None
    """Of the reranker.json that it is proved to keep; null without one."""
    max_probe_difference: float | None
    """Largest score difference over the contract's probes; null without a contract."""
    versions: dict[str, JsonValue]
