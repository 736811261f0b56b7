"""Client of one or several scorers: posts pairs to `/score` in chunks and gives back a score for each, or an error.

One task a backend and slot takes chunks from a common line. Connection failures, timeouts and 5xx are tried again with
growing, jittered pauses; 429 and 503 wait as long as the scorer asks; what a backend cannot do goes to another one. An
answer that lost, doubled, reordered or spoilt a score is an error: nothing is dropped. Chunks grow until one takes
`chunk_s`, so that a stop or a death never costs more. Knows the wire, not jobs or where scorers come from.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from tevatron.core.contracts.scores import Candidate, ScoreRequest, ScoreResponse
from tevatron.core.errors import InputError, TevatronError, UnavailableError
from tevatron.evaluator.score_log import ScoreLog


class ScorerAnswerError(TevatronError):
    """A scorer answered, and the answer cannot be right."""

    code = "scorer_answer"


class ScorerRefusedError(TevatronError):
    """A scorer refuses to work for us: a wrong token, a wrong address."""

    code = "scorer_refused"


class NotFiniteScoreError(InputError):
    """The model gives no number for a pair."""

    code = "not_finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a scorer answers."""

    url: str
    """Base URL; `/score` is added."""
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How the pool behaves; durations in seconds."""

    max_chunk: int = 1000
    """Pairs in one request."""
    first_chunk: int = 16
    chunk_s: float = 2.0
    """How long a request should take; the next chunk's size follows from the last one's speed."""
    slots: int = 2
    """Requests in flight at a backend, so that it has work while an answer is stored."""
    timeout_s: float = 600.0
    """Longest wait for an answer."""
    connect_timeout_s: float = 5.0
    tries: int = 4
    """Tries of a chunk at one backend before the backend counts as down."""
    backoff_s: float = 0.5
    """Pause before the second try; doubles with each."""
    max_backoff_s: float = 10.0
    busy_s: float = 600.0
    """How long a chunk may be put off by 429 and 503."""
    cooldown_s: float = 15.0
    """How long a backend that is down is left alone while others work."""
    poll_s: float = 0.2
    """How often `check` is called."""


@dataclass(slots=True)
class _Chunk:
    candidates: list[Candidate]
    keys: list[str]

    def split(self, size: int) -> tuple[_Chunk, _Chunk]:
        return _Chunk(self.candidates[:size], self.keys[:size]), _Chunk(
            self.candidates[size:], self.keys[size:]
        )


@dataclass(slots=True)
class _BackendState:
    backend: Backend
    client: httpx.AsyncClient
    chunk_size: int
    limit: int
    """Most pairs in a request."""
    down: str | None = None
    """Why it is down."""


class _DownError(Exception):
    """This backend cannot do the chunk now; another may."""


def score_all(
    backends: list[Backend],
    candidates: Iterable[Candidate],
    log: ScoreLog,
    *,
    options: PoolOptions | None = None,
    check: Callable[[], None] = lambda: None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, float]]:
    """Return a score for every candidate, by query id and docid.

    What `log` has already is not asked for; every finished chunk is in `log` before it is counted. Pairs of the same
    texts are scored once.

    Args:
        check: called every `poll_s`; what it raises ends the work, requests in flight included.
        on_progress: called with the number of candidates done so far.

    Raises:
        UnavailableError: no backend answers.
        ScorerAnswerError: an answer was not what was asked for.
        ScorerRefusedError: a backend refused the token or the address.
        InputError: a backend found a pair that cannot be scored; NotFiniteScoreError where the model gives no number.
    """
    if not backends:
        raise UnavailableError("no scorer to send pairs to")
    work = _Work(candidates, log, on_progress)
    asyncio.run(_Pool(backends, work, options or PoolOptions(), check).run())
    on_progress(work.num_done)
    return work.scores


class _Work:
    """The line of chunks, and what has been done of it."""

    def __init__(
        self, candidates: Iterable[Candidate], log: ScoreLog, on_progress: Callable[[int], None]
    ) -> None:
        self.scores: dict[str, dict[str, float]] = {}
        self._log = log
        self._on_progress = on_progress
        self._asked: dict[str, list[tuple[str, str]]] = {}
        """Key -> the pairs that wait for its score."""
        self._returned: deque[_Chunk] = deque()
        self._num_open = 0
        self.num_done = 0
        """Candidates that have their score."""
        self._fresh = self._select(candidates)
        self._exhausted = False

    @property
    def finished(self) -> bool:
        return self._exhausted and not self._returned and self._num_open == 0

    def take(self, size: int) -> _Chunk | None:
        """Return the next chunk, or nothing: all is done or in the hands of others."""
        if self._returned:
            self._num_open += 1
            chunk, rest = self._returned.popleft().split(size)
            if rest.keys:
                self._returned.appendleft(rest)
            return chunk
        chunk = _Chunk([], [])
        for candidate, key in self._fresh:
            chunk.candidates.append(candidate)
            chunk.keys.append(key)
            if len(chunk.keys) >= size:
                break
        else:
            self._exhausted = True
        if not chunk.keys:
            return None
        self._num_open += 1
        return chunk

    def give_back(self, chunk: _Chunk) -> None:
        self._num_open -= 1
        self._returned.append(chunk)

    def done(self, chunk: _Chunk, scores: list[float]) -> None:
        self._log.append(dict(zip(chunk.keys, scores, strict=True)))
        for key, score in zip(chunk.keys, scores, strict=True):
            for query_id, docid in self._asked.pop(key):
                self._keep(query_id, docid, score)
        self._num_open -= 1
        self._on_progress(self.num_done)

    def _select(self, candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, str]]:
        for candidate in candidates:
            key = self._log.key(candidate)
            score = self._log.get(key)
            if score is not None:
                self._keep(candidate.query_id, candidate.docid, score)
            elif key in self._asked:
                self._asked[key].append((candidate.query_id, candidate.docid))
            else:
                self._asked[key] = [(candidate.query_id, candidate.docid)]
                yield candidate, key

    def _keep(self, query_id: str, docid: str, score: float) -> None:
        by_docid = self.scores.setdefault(query_id, {})
        if docid in by_docid:
            raise InputError(
                f"document '{docid}' stands twice among the candidates of query '{query_id}'"
            )
        by_docid[docid] = score
        self.num_done += 1


class _Pool:
    def __init__(
        self, backends: list[Backend], work: _Work, options: PoolOptions, check: Callable[[], None]
    ) -> None:
        self._work = work
        self._options = options
        self._check = check
        timeout = httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s)
        self._states = [
            _BackendState(
                backend,
                # trust_env: a proxy that is meant for the outside must not see scorers.
                httpx.AsyncClient(
                    base_url=backend.url,
                    timeout=timeout,
                    trust_env=False,
                    headers={"Authorization": f"Bearer {backend.token}"} if backend.token else {},
                ),
                min(options.first_chunk, options.max_chunk),
                options.max_chunk,
            )
            for backend in backends
        ]

    async def run(self) -> None:
        tasks = [
            asyncio.create_task(self._serve(state))
            for state in self._states
            for _ in range(self._options.slots)
        ]
        try:
            while pending := [task for task in tasks if not task.done()]:
                self._check()
                done, _ = await asyncio.wait(
                    pending, timeout=self._options.poll_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for state in self._states:
                await state.client.aclose()

    async def _serve(self, state: _BackendState) -> None:
        """Take chunks for one slot of a backend until all work is done."""
        while not self._work.finished:
            if state.down is not None and not await self._cool_down(state):
                return
            chunk = self._work.take(state.chunk_size)
            if chunk is None:
                if not self._work.finished:
                    # The last chunks are with others, and may come back.
                    await asyncio.sleep(self._options.poll_s)
                continue
            try:
                scores = await self._score(state, chunk)
            except _DownError as error:
                state.down = str(error)
                self._work.give_back(chunk)
                self._raise_if_all_down()
            except _TooLargeError:
                self._halve(state, chunk)
            else:
                self._work.done(chunk, scores)

    async def _cool_down(self, state: _BackendState) -> bool:
        """Wait before a backend that was down is tried again; False when there is nothing left to do."""
        end = time.monotonic() + self._options.cooldown_s
        while time.monotonic() < end:
            if self._work.finished:
                return False
            await asyncio.sleep(min(self._options.poll_s, self._options.cooldown_s))
        state.down = None
        return True

    def _raise_if_all_down(self) -> None:
        if all(state.down is not None for state in self._states):
            reasons = "; ".join(f"{state.backend.url}: {state.down}" for state in self._states)
            raise UnavailableError(f"no scorer answers: {reasons}")

    def _halve(self, state: _BackendState, chunk: _Chunk) -> None:
        half = len(chunk.keys) // 2
        if half == 0:
            pair = chunk.candidates[0]
            raise InputError(
                f"scorer {state.backend.url} finds one pair too large: query '{pair.query_id}', document "
                f"'{pair.docid}', {len(pair.query)} and {len(pair.text)} characters"
            )
        # The limit that it told stays: growing into it again would cost a request each time.
        state.chunk_size = state.limit = half
        self._work.give_back(chunk)

    async def _score(self, state: _BackendState, chunk: _Chunk) -> list[float]:
        """Score a chunk at one backend, or say that it is down."""
        options = self._options
        body = ScoreRequest(candidates=chunk.candidates).model_dump_json(exclude_none=True)
        tries, put_off_until = 0, time.monotonic() + options.busy_s
        while True:
            started = time.monotonic()
            pause = 0.0
            try:
                response = await state.client.post(
                    "/score", content=body, headers={"Content-Type": "application/json"}
                )
            except httpx.RequestError as error:
                tries += 1
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if isinstance(error, httpx.ReadTimeout):
                    state.chunk_size = max(1, len(chunk.keys) // 2)
            else:
                if response.status_code == httpx.codes.OK:
                    self._adapt(state, len(chunk.keys), time.monotonic() - started)
                    return _checked_scores(state.backend.url, chunk, response)
                _raise_if_refused(state.backend.url, chunk, response)
                reason = f"{response.status_code} {_detail(response)}"
                pause = _retry_after(response)
                if response.status_code in _BUSY and time.monotonic() + pause < put_off_until:
                    tries = 0
                else:
                    tries += 1
            if tries >= options.tries:
                raise _DownError(f"{reason} ({tries} tries)")
            await asyncio.sleep(max(pause, self._backoff(max(tries, 1))))

    def _backoff(self, tries: int) -> float:
        # Full jitter: clients that were refused together do not come back together.
        longest = min(self._options.backoff_s * 2 ** (tries - 1), self._options.max_backoff_s)
        return float(longest * random.uniform(0.5, 1.0))

    def _adapt(self, state: _BackendState, num_pairs: int, elapsed_s: float) -> None:
        fits = int(num_pairs * self._options.chunk_s / max(elapsed_s, 1e-3))
        state.chunk_size = max(1, min(fits, 2 * state.chunk_size, state.limit))


class _TooLargeError(Exception):
    """The backend takes smaller requests only."""


_BUSY = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})


def _raise_if_refused(url: str, chunk: _Chunk, response: httpx.Response) -> None:
    """Raise what no further try can mend; return for 429 and 5xx."""
    status = response.status_code
    if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        raise _TooLargeError
    if status in (httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.BAD_REQUEST):
        queries = list(dict.fromkeys(candidate.query_id for candidate in chunk.candidates))
        kind = (
            NotFiniteScoreError
            if _problem(response).get("code") == NotFiniteScoreError.code
            else InputError
        )
        raise kind(
            f"scorer {url} refused {len(chunk.candidates)} pairs of queries {queries[:3]}: {status} {_detail(response)}"
        )
    if not (status == httpx.codes.TOO_MANY_REQUESTS or status >= 500):
        raise ScorerRefusedError(
            f"scorer {url} answered {status} {_detail(response)}: expected 200 from POST /score"
        )


def _checked_scores(url: str, chunk: _Chunk, response: httpx.Response) -> list[float]:
    """Return the scores in the order of the chunk; anything else than one finite score a pair is an error."""
    try:
        scores = ScoreResponse.model_validate_json(response.content).scores
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ScorerAnswerError(
            f"scorer {url} answered {place or 'text'} that is no score: {first['msg']}, got {str(first['input'])[:100]!r}"
        ) from error
    if len(scores) != len(chunk.candidates):
        raise ScorerAnswerError(
            f"scorer {url} gave {len(scores)} scores for {len(chunk.candidates)} pairs"
        )
    for candidate, score in zip(chunk.candidates, scores, strict=True):
        asked, got = (candidate.query_id, candidate.docid), (score.query_id, score.docid)
        if asked != got:
            raise ScorerAnswerError(f"scorer {url} answered for pair {got} where {asked} was asked")
        if score.missing:
            raise ScorerAnswerError(f"scorer {url} says that its score of pair {asked} is missing")
    return [score.score for score in scores]


def _retry_after(response: httpx.Response) -> float:
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        # The other form is a date; the backoff has to do.
        return 0.0
    return min(max(seconds, 0.0), 60.0)


def _detail(response: httpx.Response) -> str:
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
