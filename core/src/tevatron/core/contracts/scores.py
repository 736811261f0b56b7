"""Wire types of `POST /score`, in the reference's form, and of a scorer's `/info`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from tevatron.core.contracts.jobs import Spec

MAX_CANDIDATES = 10_000
"""Pairs in one request."""
MAX_TEXT_CHARACTERS = 1_000_000
"""Characters of one query, title or text: far more than any prompt holds."""

Id = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]


class Candidate(Spec):
    """One pair to score."""

    query_id: Id
    docid: Id
    query: Text
    text: Text = ""
    title: Text = ""


class ScoreRequest(Spec):
    """Body of `POST /score`; a prefix other than the contract's is refused."""

    candidates: list[Candidate] = Field(min_length=1, max_length=MAX_CANDIDATES)
    query_prefix: str | None = None
    passage_prefix: str | None = None

    @model_validator(mode="after")
    def _each_pair_once(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for place, one in enumerate(self.candidates):
            if (one.query_id, one.docid) in seen:
                raise ValueError(
                    f"candidates.{place}: query_id '{one.query_id}' with docid '{one.docid}' is there twice"
                )
            seen.add((one.query_id, one.docid))
        return self


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
    probe_tolerance: float | None = None
    """Difference that was allowed; null without a contract."""
    versions: dict[str, JsonValue]
