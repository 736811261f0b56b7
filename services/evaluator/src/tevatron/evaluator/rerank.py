"""Reranking a first stage: which pairs are scored, and the run that comes out.

The best `depth` candidates of each query take the scorer's order; the others keep theirs, below. Every candidate of the
first stage is in the result: reranking never shrinks a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from tevatron.core.contracts.jobs import Rerank
from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.evaluator.job_scoring import JobScoring
from tevatron.evaluator.metrics import Run, cut, rank
from tevatron.evaluator.pool import Backends
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scoring import score_all
from tevatron.evaluator.served import Served


def identity_of(rerank: Rerank) -> str:
    """Say what decides a score besides the pair's texts; goes into the keys of the log of scores."""
    return json.dumps(rerank.model_dump(mode="json", exclude={"depth", "replicas"}), sort_keys=True)


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


def rerank_first_stage(
    first: Run,
    scoring: JobScoring,
    log: ScoreLog,
    *,
    depth: int,
    queries: Mapping[str, str],
    documents: Mapping[str, Document],
    check: Callable[[], None],
) -> dict[str, dict[str, float]]:
    """Return the first stage with the best `depth` candidates of each query in the scorers' order."""
    top = cut(first, depth=depth)
    total = sum(map(len, top.values()))

    def score(backends: Backends, served: Served) -> dict[str, dict[str, float]]:
        log.served_by(served.identity)
        return score_all(
            backends,
            make_candidates(top, queries, documents),
            log,
            served=served,
            options=scoring.options,
            check=check,
            on_progress=lambda done: scoring.progress(done, total, "pairs"),
        )

    return merge(first, scoring.run(score, num_kept=lambda: len(log)))
