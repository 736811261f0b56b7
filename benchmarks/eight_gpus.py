"""The paper's layouts on eight GPUs: what it publishes, what the plan says, and what was measured. render.py shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from plan_peaks import padded_gib, planned
from record import read_rows
from train_cases import Case
from train_throughput import SETS

from tevatron.core.contracts.plan import GIB

EPOCH_PAIRS = 648_766 * 8
"""Of RLHN-680K."""
HEAD = """
## eight GPUs

`python benchmarks/train_throughput.py eight` on a machine of eight H200s (one of its cases alone: `eight --only N`), with the pairs a
replica of the runs on two. Rows without pairs/s were not run: no such machine was at hand. An epoch is RLHN-680K's 648,766 queries of 8
pairs; the plan is of a full pass, with the logits of a padded one; the last column is the rate a GPU beside the same row's on two.
"""


class Published(NamedTuple):
    """What the paper says of a layout."""

    hours: str
    gib: float


PAPER = {
    "TP=2 DP=4, full": Published("8 h 55", 106),
    "DP=8, full": Published("10 h 36", 106),
    "hf, DP=8, FSDP1 full_shard, full": Published("11 h 22", 51),
    "hf, DP=8, FSDP1 shard_grad_op, full": Published("11 h 00", 49),
    "TP=2 DP=4, LoRA": Published("8 h 47", 0),
}
"""By the start of the reference's label; its Table 2 and what it says beside it."""


def section() -> str:
    """Return the section of docs/benchmarks.md."""
    rates = {
        (row["model"], row["layout"], row["method"]): row["value"]
        for row in read_rows("train_throughput")
    }
    lines = [
        "| N | model | layout | method | plan GiB | paper GiB | paper's epoch | pairs/s | epoch, h | of two GPUs' |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for place, case in enumerate(SETS["eight"]):
        own, on_two = rates.get(key(case), 0.0), rates.get(key(peer(case)), 0.0)
        published = _published(case)
        cells = [
            str(place),
            case.model,
            case.label,
            case.method,
            f"{plan_gib(case):.0f}",
            f"{published.gib:g}" if published and published.gib else "",
            published.hours if published else "",
            f"{own:.0f}" if own else "",
            f"{EPOCH_PAIRS / own / 3600:.1f}" if own else "",
            f"{own / case.gpus / (on_two / 2):.2f}" if own and on_two else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return HEAD + "\n" + "\n".join(lines) + "\n"


def key(case: Case) -> tuple[str, str, str]:
    """Return what tells a case's row from others."""
    return case.model, case.label, case.method


def peer(case: Case) -> Case:
    """Return the same on two GPUs."""
    return replace(case, gpus=2, expert=min(2, case.expert))


def plan_gib(case: Case) -> float:
    """Return what the plan says that each GPU needs for a full pass."""
    if case.packed:
        return planned(case, tokens=case.tokens).total / GIB
    return sum(padded_gib(case))


def _published(case: Case) -> Published | None:
    if case.method != "reference":
        return None
    found = [one for start, one in PAPER.items() if case.label.startswith(start)]
    return found[0] if found else None
