"""`POST /score`, in the reference's form."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.responses import Response

from tevatron.core.contracts.checkpoint import check_request_prefixes
from tevatron.core.contracts.scores import Score, ScoreRequest, ScoreResponse
from tevatron.core.errors import InputError
from tevatron.core.prompts import Pair
from tevatron.scorer.server.answers import answered, body_of, first_fault, json_response, refusals
from tevatron.scorer.server.service import Service


def add_score(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post(
        "/score",
        response_model=ScoreResponse,
        openapi_extra=body_of(ScoreRequest),
        responses=refusals(401, 413, 415, 422, 429, 500, 503),
    )
    async def score(request: Request) -> Response:
        """Score pairs; the answer is in the order of the request."""
        return await answered(service, "/score", lambda: _score(service, request))


async def _score(service: Service, request: Request) -> Response:
    asked = await service.parse(request, _parse)
    check_request_prefixes(
        service.served.renderer,
        query_prefix=asked.query_prefix,
        passage_prefix=asked.passage_prefix,
    )
    candidates = asked.candidates
    scored = await service.score(
        [Pair(query=one.query, title=one.title, text=one.text) for one in candidates],
        request,
        name=lambda at: f"query_id '{candidates[at].query_id}', docid '{candidates[at].docid}'",
    )
    return json_response(
        ScoreResponse(
            scores=[
                Score(
                    query_id=one.query_id,
                    docid=one.docid,
                    score=pair.score,
                    truncated_tokens=pair.truncated_tokens,
                )
                for one, pair in zip(candidates, scored, strict=True)
            ]
        )
    )


def _parse(body: bytes) -> ScoreRequest:
    try:
        return ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
