"""What a scorer's answers mean: scores in the order of the request, a refusal, or a reason to try again.

Nothing that a scorer says is believed unseen: an answer that lost, doubled, reordered or spoilt a score is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from pydantic import ValidationError

from tevatron.core.contracts.scores import Candidate, ScoreResponse
from tevatron.core.errors import InputError, TevatronError

BUSY = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})


class ScorerAnswerError(TevatronError):
    """A scorer answered, and the answer cannot be right."""

    code = "scorer_answer"


class ScorerRefusedError(TevatronError):
    """A scorer refuses to work for us: a wrong token, a wrong address."""

    code = "scorer_refused"


class ScorersDifferError(TevatronError):
    """Scorers of one pool serve different things: one ranking would mix scores that cannot be compared."""

    code = "scorers_differ"


class NotFiniteScoreError(InputError):
    """The model gives no number for a pair."""

    code = "not_finite"


class RequestTooLargeError(Exception):
    """The backend takes smaller requests only."""


class AgainError(Exception):
    """The backend cannot do it now; another may, or this one later."""

    def __init__(self, reason: str, *, pause_s: float = 0.0, is_busy: bool = False) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        self.is_busy = is_busy


def checked_scores(
    url: str, candidates: Sequence[Candidate], response: httpx.Response
) -> list[float]:
    """Return the scores in the order of the request; anything else than one finite score a pair is an error."""
    try:
        scores = ScoreResponse.model_validate_json(response.content).scores
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ScorerAnswerError(
            f"scorer {url} answered {place or 'text'} that is no score: {first['msg']}, got {str(first['input'])[:100]!r}"
        ) from error
    if len(scores) != len(candidates):
        raise ScorerAnswerError(
            f"scorer {url} gave {len(scores)} scores for {len(candidates)} pairs"
        )
    for candidate, score in zip(candidates, scores, strict=True):
        asked, got = (candidate.query_id, candidate.docid), (score.query_id, score.docid)
        if asked != got:
            raise ScorerAnswerError(f"scorer {url} answered for pair {got} where {asked} was asked")
        if score.missing:
            raise ScorerAnswerError(f"scorer {url} says that its score of pair {asked} is missing")
    return [score.score for score in scores]


def raise_if_refused(url: str, candidates: Sequence[Candidate], response: httpx.Response) -> None:
    """Raise what no further try can mend; return for 429 and 5xx."""
    status = response.status_code
    if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        raise RequestTooLargeError
    if status in (httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.BAD_REQUEST):
        queries = list(dict.fromkeys(candidate.query_id for candidate in candidates))
        kind = (
            NotFiniteScoreError
            if _problem(response).get("code") == NotFiniteScoreError.code
            else InputError
        )
        raise kind(
            f"scorer {url} refused {len(candidates)} pairs of queries {queries[:3]}: {status} {detail_of(response)}"
        )
    if not (status == httpx.codes.TOO_MANY_REQUESTS or status >= 500):
        raise ScorerRefusedError(
            f"scorer {url} answered {status} {detail_of(response)}: expected 200 from POST /score"
        )


@contextmanager
def try_again() -> Iterator[None]:
    """Turn failures that may pass into an `AgainError`."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise again(error.response) from error
    except httpx.RequestError as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise AgainError(reason) from error


def again(response: httpx.Response) -> AgainError:
    """Return what 429 or 5xx says."""
    return AgainError(
        f"{response.status_code} {detail_of(response)}",
        pause_s=_retry_after_s(response),
        is_busy=response.status_code in BUSY,
    )


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds that a `Retry-After` asks for, at most a minute; 0 without one."""
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        # The other form is a date; the backoff has to do.
        return 0.0
    return min(max(seconds, 0.0), 60.0)


def detail_of(response: httpx.Response) -> str:
    """Return a problem document's detail, or the beginning of the text."""
    detail = _problem(response).get("detail")
    return str(detail)[:500] if detail else response.text[:200].strip() or response.reason_phrase


def _problem(response: httpx.Response) -> dict[str, object]:
    """Return the answer as a problem document; an empty one where it is none."""
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
