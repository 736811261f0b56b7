"""Whether a run and judgments are about the same queries and documents at all: ids that never meet give plain zeros.

Knows ids only. Where they would meet in another spelling (leading zeros, `.0`, upper case) the message says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tevatron.core.errors import InputError
from tevatron.evaluator.metrics import Qrels, Run

_EXAMPLES = 3


def check_overlap(qrels: Qrels, run: Run) -> None:
    """Refuse a run of which no query, or none of whose documents for any query, is judged.

    Raises:
        InputError: Names examples of both sides.
    """
    both = sorted(qrels.keys() & run.keys())
    if not both:
        raise InputError(
            f"no query of the run is judged: the qrels have {len(qrels)} queries such as {_some(qrels)}, "
            f"the run has {len(run)} such as {_some(run)}{_hint(qrels, run)}"
        )
    if any(not qrels[qid].keys().isdisjoint(run[qid]) for qid in both):
        return
    ranked = {docid for qid in both for docid in run[qid]}
    judged = {docid for qid in both for docid in qrels[qid]}
    raise InputError(
        f"none of the documents that the run ranks for {len(both)} judged queries is judged for its query: the qrels have "
        f"documents such as {_some(judged)}, the run such as {_some(ranked)}"
        f"{_hint(judged, ranked) or '. Is it another version of the collection?'}"
    )


def _some(ids: Mapping[str, object] | set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(ids)[:_EXAMPLES]) or "none"


def _hint(ours: Iterable[str], theirs: Iterable[str]) -> str:
    """Say under which spelling ids would meet; nothing where they would not."""
    spelled = {_plain(name): name for name in sorted(ours)}
    pairs = [(spelled[_plain(name)], name) for name in sorted(theirs) if _plain(name) in spelled]
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    if not pairs:
        return ""
    one, other = pairs[0]
    return (
        f". {len(pairs)} of them would meet without leading zeros, '.0' and upper case, such as "
        f"'{one}' and '{other}': are the ids written otherwise?"
    )


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".0").lstrip("0")
