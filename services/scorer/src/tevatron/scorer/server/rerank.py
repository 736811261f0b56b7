"""`/rerank`, `/v1/rerank` and `/v2/rerank`: the forms of Cohere, Jina and vLLM, and on `/rerank` that of TEI.

Scores are sigmoids unless raw ones are asked for; the order is always that of the raw scores, which never saturate.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from tevatron.core.contracts.rerank import (
    ApiVersion,
    Document,
    Meta,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ReturnedDocument,
    TeiError,
    TeiRank,
    TeiRerankRequest,
    Usage,
)
from tevatron.core.contracts.scores import MAX_CANDIDATES
from tevatron.core.errors import (
    BusyError,
    InputError,
    PromptError,
    QueryTooLongError,
    TevatronError,
    TooLargeError,
    UnavailableError,
)
from tevatron.core.prompts import Pair
from tevatron.scorer.served import Served
from tevatron.scorer.server.answers import answered, body_of, first_fault, json_response, refusals
from tevatron.scorer.server.batching import EngineFailedError
from tevatron.scorer.server.problems import problem_of, retry_after, shown
from tevatron.scorer.server.service import NotFiniteScoreError, Scored, Service

_REFUSALS = (401, 413, 415, 422, 429, 500, 503)
_RANKS = TypeAdapter(list[TeiRank])


def add_rerank(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(
        "/rerank",
        response_model=RerankResponse | list[TeiRank],
        openapi_extra=body_of(RerankRequest, TeiRerankRequest),
        responses=refusals(*_REFUSALS, 424, other_form=TeiError),
    )
    async def rerank(request: Request) -> Response:
        """Rank documents (Jina, vLLM) or texts (text-embeddings-inference)."""
        return await _either(service, request)

    @app.post(
        "/v1/rerank",
        response_model=RerankResponse,
        openapi_extra=body_of(RerankRequest),
        responses=refusals(*_REFUSALS),
    )
    async def rerank_v1(request: Request) -> Response:
        """Rank documents (Cohere v1, Jina, vLLM)."""
        return await _documents(service, request, "/v1/rerank", version="1", returned=True)

    @app.post(
        "/v2/rerank",
        response_model=RerankResponse,
        openapi_extra=body_of(RerankRequest),
        responses=refusals(*_REFUSALS),
    )
    async def rerank_v2(request: Request) -> Response:
        """Rank documents (Cohere v2)."""
        return await _documents(service, request, "/v2/rerank", version="2", returned=False)


async def _documents(
    service: Service, request: Request, path: str, *, version: str, returned: bool
) -> Response:
    async def work() -> Response:
        asked = await service.parse(request, _parse)
        return json_response(
            await _rerank(service, request, asked, version=version, returned=returned),
            exclude_none=True,
        )

    return await answered(service, path, work)


async def _either(service: Service, request: Request) -> Response:
    """Answer in the form that was asked in, errors too."""
    refusal: Callable[[TevatronError], Response] = problem_of

    async def work() -> Response:
        nonlocal refusal
        content = await service.parse(request, _content)
        if isinstance(content, dict) and "texts" in content and "documents" not in content:
            refusal = _tei_refusal
            return await _rank_texts(service, request, _tei_request(content))
        asked = _request(content)
        return json_response(
            await _rerank(service, request, asked, version="1", returned=True), exclude_none=True
        )

    return await answered(service, "/rerank", work, refusal=lambda error: refusal(error))


async def _rerank(
    service: Service, request: Request, asked: RerankRequest, *, version: str, returned: bool
) -> RerankResponse:
    served = service.served
    documents = [
        one if isinstance(one, Document) else Document(text=one) for one in asked.documents
    ]
    _check_instruction(served, asked.instruction)
    scored = await service.score(
        [
            Pair(query=asked.query, title=one.title, text=one.text, instruction=asked.instruction)
            for one in documents
        ],
        request,
        name=lambda at: f"documents.{at}",
        max_text_tokens=asked.max_tokens_per_doc,
    )
    if asked.return_documents is not None:
        returned = asked.return_documents
    num_tokens = sum(one.num_tokens for one in scored)
    best = _best_first(scored)
    return RerankResponse(
        id=asked.request_id or f"rerank-{uuid.uuid4().hex}",
        model=served.info.model_name_or_path,
        results=[
            RerankResult(
                index=place,
                relevance_score=_shown_score(scored[place].score, raw=asked.wants_raw),
                document=ReturnedDocument(text=documents[place].text) if returned else None,
                truncated_tokens=scored[place].truncated_tokens,
            )
            for place in best[: asked.top_n or len(best)]
        ],
        usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        meta=Meta(api_version=ApiVersion(version=version)),
    )


async def _rank_texts(service: Service, request: Request, asked: TeiRerankRequest) -> Response:
    if not asked.texts:
        raise TooLargeError("`texts` cannot be empty")
    if len(asked.texts) > MAX_CANDIDATES:
        raise TooLargeError(
            f"batch size {len(asked.texts)} > maximum allowed batch size {MAX_CANDIDATES}"
        )
    scored = await service.score(
        [Pair(query=asked.query, text=text) for text in asked.texts],
        request,
        name=lambda at: f"texts.{at}",
    )
    cut = [place for place, one in enumerate(scored) if one.truncated_tokens]
    if cut and asked.truncate is False:
        raise TooLargeError(
            f"texts.{cut[0]} (and {len(cut) - 1} more) must have fewer tokens: {scored[cut[0]].truncated_tokens} are "
            f"too many for max_length {service.served.renderer.max_length}, and `truncate` is false"
        )
    ranks = [
        TeiRank(
            index=place,
            score=_shown_score(scored[place].score, raw=asked.raw_scores),
            text=asked.texts[place] if asked.return_text else None,
            truncated_tokens=scored[place].truncated_tokens or None,
        )
        for place in _best_first(scored)[: asked.top_n or len(scored)]
    ]
    return Response(_RANKS.dump_json(ranks, exclude_none=True), media_type="application/json")


def _check_instruction(served: Served, instruction: str | None) -> None:
    template = served.renderer.template
    if instruction is None or instruction == template.instruction:
        return
    if template.instruction is None:
        raise PromptError(f"instruction: template '{template.name}' has no place for one")
    if served.info.max_probe_difference is not None:
        raise PromptError(
            f"instruction differs: this scorer was trained with {template.instruction!r}, the request has {instruction!r}"
        )


def _best_first(scored: Sequence[Scored]) -> list[int]:
    return sorted(range(len(scored)), key=lambda place: (-scored[place].score, place))


def _shown_score(score: float, *, raw: bool) -> float:
    if raw:
        return score
    if score >= 0:
        return 1 / (1 + math.exp(-score))
    grown = math.exp(score)
    return grown / (1 + grown)


def _content(body: bytes) -> object:
    try:
        content: object = from_json(body)
    except ValueError as error:
        raise InputError(f"body: Invalid JSON: {error}") from error
    return content


def _parse(body: bytes) -> RerankRequest:
    return _request(_content(body))


def _request(content: object) -> RerankRequest:
    try:
        return RerankRequest.model_validate(content)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error


def _tei_request(content: object) -> TeiRerankRequest:
    try:
        return TeiRerankRequest.model_validate(content)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error


def _tei_refusal(error: TevatronError) -> Response:
    """Write an error as TEI does."""
    content = TeiError(error=shown(str(error)), error_type="Validation")
    status = error.status_code
    if isinstance(error, BusyError):
        content.error_type = "Overloaded"
    elif isinstance(error, UnavailableError):
        content.error_type = "Unhealthy"
    elif isinstance(error, EngineFailedError | NotFiniteScoreError):
        content.error_type, status = "Backend", 424
    elif isinstance(error, QueryTooLongError):
        status = 413
    elif isinstance(error, PromptError):
        content.error_type = "Tokenizer"
    return JSONResponse(content.model_dump(), status, headers=retry_after(error))
