"""Scores for the candidates of a ranking: each pair once, kept in a log as they come, and complete or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import InputError
from tevatron.evaluator.pool import Backends, PoolOptions, stream_scores
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.served import Served


def score_all(
    backends: Backends,
    candidates: Iterable[Candidate],
    log: ScoreLog,
    *,
    served: Served | None = None,
    options: PoolOptions | None = None,
    check: Callable[[], None] = lambda: None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, float]]:
    """Return a score for every candidate, by query id and docid.

    What `log` has already is not asked for; every finished chunk is in `log` before it is counted. Pairs of the same
    texts are scored once. Raises what `stream_scores` does.

    Args:
        on_progress: called with the number of candidates done so far.
    """
    work = _LoggedWork(candidates, log, on_progress)
    stream_scores(
        backends, work.open_pairs(), work.done, served=served, options=options, check=check
    )
    on_progress(work.num_done)
    return work.scores


class _LoggedWork:
    """Candidates without those that the log has, and where the scores go."""

    def __init__(
        self, candidates: Iterable[Candidate], log: ScoreLog, on_progress: Callable[[int], None]
    ) -> None:
        self.scores: dict[str, dict[str, float]] = {}
        self.num_done = 0
        """Candidates that have their score."""
        self._candidates = candidates
        self._log = log
        self._on_progress = on_progress
        self._seen: dict[str, set[str]] = {}
        self._asked: dict[str, list[tuple[str, str]]] = {}
        """Key -> the pairs that wait for its score."""

    def open_pairs(self) -> Iterator[tuple[str, Candidate]]:
        for candidate in self._candidates:
            self._see(candidate)
            key = self._log.key(candidate)
            score = self._log.get(key)
            if score is not None:
                self._keep(candidate.query_id, candidate.docid, score)
            elif key in self._asked:
                self._asked[key].append((candidate.query_id, candidate.docid))
            else:
                self._asked[key] = [(candidate.query_id, candidate.docid)]
                yield key, candidate

    def done(self, keys: Sequence[str], scores: Sequence[float]) -> None:
        self._log.append(dict(zip(keys, scores, strict=True)))
        for key, score in zip(keys, scores, strict=True):
            for query_id, docid in self._asked.pop(key):
                self._keep(query_id, docid, score)
        self._on_progress(self.num_done)

    def _see(self, candidate: Candidate) -> None:
        docids = self._seen.setdefault(candidate.query_id, set())
        if candidate.docid in docids:
            raise InputError(
                f"document '{candidate.docid}' stands twice among the candidates of query '{candidate.query_id}'"
            )
        docids.add(candidate.docid)

    def _keep(self, query_id: str, docid: str, score: float) -> None:
        self.scores.setdefault(query_id, {})[docid] = score
        self.num_done += 1
