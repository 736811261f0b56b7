"""Reranking a first stage: which pairs are scored, how a scorer's death is survived, and the run that comes out.

The best `depth` candidates of each query take the scorer's order; the others keep theirs, below. Every candidate of the
first stage is in the result: reranking never shrinks a list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from tevatron.core.contracts.jobs import FailReason, Phase, Rerank
from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import InputError, JobError, UnavailableError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.core.worker.runner import JobContext
from tevatron.evaluator.metrics import Run, cut, rank
from tevatron.evaluator.pool import (
    NotFiniteScoreError,
    PoolOptions,
    ScorerAnswerError,
    ScorerRefusedError,
    score_all,
)
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scorers import Endpoint, JobScorers

GIVE_UP_S = 60.0
"""How long scorers whose rows say `ready` may fail to answer, on top of two leases: by then a dead host is known."""


def identity_of(rerank: Rerank) -> str:
    """Say what decides a score besides the pair's texts; goes into the keys of the log of scores."""
    return json.dumps(rerank.model_dump(mode="json", exclude={"depth"}), sort_keys=True)


def read_documents(dataset: BeirFolder, run: Run) -> dict[str, Document]:
    """Read the documents of a run from the corpus; one that is not there is an error."""
    wanted = {docid for scores in run.values() for docid in scores}
    found = {document.docid: document for document in dataset.corpus() if document.docid in wanted}
    if lost := sorted(wanted - found.keys()):
        raise InputError(
            f"{len(lost)} of {len(wanted)} candidates are not in the corpus of {dataset.path.name}, such as {lost[:3]}"
        )
    return found


def make_candidates(
    run: Run, queries: Mapping[str, str], documents: Mapping[str, Document]
) -> Iterator[Candidate]:
    """Yield the pairs to score, query by query, best first."""
    for query_id, scores in run.items():
        for docid in scores:
            document = documents[docid]
            try:
                yield Candidate(
                    query_id=query_id,
                    docid=docid,
                    query=queries[query_id],
                    title=document.title,
                    text=document.text,
                )
            except ValidationError as error:
                raise InputError(
                    f"query '{query_id[:100]}', document '{docid[:100]}' cannot be sent to a scorer: "
                    f"{error.errors(include_url=False)[0]['msg']}"
                ) from error


def merge(first: Run, scored: Run) -> dict[str, dict[str, float]]:
    """Put the scored documents of each query on top, in the scorer's order, and the others below in their own."""
    merged = {}
    for query_id, scores in first.items():
        reranked = dict(scored.get(query_id, {}))
        lowest = min(reranked.values(), default=0.0)
        # Wide enough steps that float32, in which runs are compared, keeps them apart.
        step = max(1.0, abs(lowest) * 1e-5)
        rest = (docid for docid in rank(scores) if docid not in reranked)
        below = {docid: lowest - place * step for place, docid in enumerate(rest, start=1)}
        merged[query_id] = reranked | below
    return merged


class Reranker:
    """Scores the candidates of one job, on whatever its scorers are at the moment."""

    def __init__(
        self,
        ctx: JobContext,
        scorers: JobScorers,
        log: ScoreLog,
        *,
        options: PoolOptions | None = None,
    ) -> None:
        self._ctx = ctx
        self._scorers = scorers
        self._log = log
        self._options = options
        self._phase: Phase | None = None
        self._trouble_since: float | None = None
        self._endpoints: list[Endpoint] = []

    def run(
        self,
        first: Run,
        *,
        depth: int,
        queries: Mapping[str, str],
        documents: Mapping[str, Document],
    ) -> dict[str, dict[str, float]]:
        """Return the reranked run."""
        top = cut(first, depth=depth)
        total = sum(map(len, top.values()))

        def on_progress(done: int) -> None:
            # A scorer that was away may come back under the same address.
            self._enter(Phase.SCORING)
            self._ctx.progress(done, total, "pairs")
            self._scorers.touch()

        while True:
            self._find_scorers()
            self._log.served_by(self._served())
            had = len(self._log)
            try:
                scored = score_all(
                    [endpoint.backend for endpoint in self._endpoints],
                    make_candidates(top, queries, documents),
                    self._log,
                    options=self._options,
                    check=self._ctx.check,
                    on_progress=on_progress,
                )
            except (UnavailableError, ScorerRefusedError) as error:
                self._bear(error, progressed=len(self._log) > had)
            except ScorerAnswerError as error:
                raise _scorer_failed(str(error)) from error
            except NotFiniteScoreError as error:
                raise JobError(
                    str(error), reason=FailReason.NOT_FINITE, phase=Phase.SCORING
                ) from error
            else:
                return merge(first, scored)

    def _find_scorers(self) -> None:
        if not self._endpoints or self._trouble_since is not None:
            self._enter(Phase.WAITING_FOR_SCORER)
        endpoints = self._scorers.wait_ready()
        if endpoints != self._endpoints:
            self._trouble_since = None
        self._endpoints = endpoints
        if self._trouble_since is None:
            self._enter(Phase.SCORING)

    def _served(self) -> str:
        """Return what all scorers of the job say they serve."""
        # A model without a contract is served in its host's own arithmetic, and hosts may differ.
        said = {endpoint.served for endpoint in self._endpoints if not endpoint.external}
        if len(said) > 1:
            raise _scorer_failed(
                f"the scorers' scores cannot be compared, they serve: {'; '.join(sorted(said))}"
            )
        return next(iter(said), "")

    def _bear(self, error: UnavailableError | ScorerRefusedError, *, progressed: bool) -> None:
        """Go on waiting for scorers that do not answer, or give up."""
        if isinstance(error, ScorerRefusedError) and all(
            endpoint.external for endpoint in self._endpoints
        ):
            # Nobody will write another address or token for it.
            raise _scorer_failed(str(error)) from error
        now = time.monotonic()
        if self._trouble_since is None or progressed:
            self._trouble_since = now
            self._ctx.log("warning", f"{error}; waiting for it, {len(self._log)} scores are kept")
        give_up_s = GIVE_UP_S + 2 * self._ctx.settings.lease_s
        if now - self._trouble_since > give_up_s:
            raise _scorer_failed(f"{error}; waited {give_up_s:.0f} s for it") from error
        self._ctx.wait(self._ctx.settings.poll_s)
        self._ctx.check()

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._ctx.phase(phase)


def _scorer_failed(message: str) -> JobError:
    return JobError(message, reason=FailReason.SCORER_FAILED, phase=Phase.SCORING)
