"""The plan beside peaks that were measured, and beside those that the paper prints: `python benchmarks/plan_peaks.py`.

Writes the tables into docs/megatron.md; `--check` writes nothing and fails where they are not there (a test runs it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from record import RESULTS
from train_cases import Case
from train_throughput import SETS

from tevatron.core.contracts.plan import GIB, MemoryParts
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.plan import memory

PAGE = Path(__file__).parent.parent / "docs" / "megatron.md"
START, END = "<!-- plan_peaks: start -->", "<!-- plan_peaks: end -->"

_8B = Case(backend="megatron", method="reference", model="qwen3-8b", gpus=8)
_30B = replace(_8B, model="qwen3-30b-a3b", gpus=16, expert=16, micro_batch=1)
LOGIT_BYTES = 2 + 4 + 4 + 2
"""A number of the reference's full-vocabulary logits: bf16, its fp32 copy, and the gradients of both."""


class Published(NamedTuple):
    """A peak of the paper, and the case that comes closest to what it says of it."""

    what: str
    gib: float
    case: Case
    left_out: str
    """What the paper does not say."""


PAPER = [
    Published(
        "8B, TP=2 DP=4, no recompute", 106, replace(_8B, tensor=2), "micro batch: the code's 4"
    ),
    Published(
        "8B, DP=8, recompute", 106, replace(_8B, recompute=True), "micro batch: the code's 4"
    ),
    Published("30B-A3B, EP=16 DP=16, full", 78.9, _30B, "full or LoRA; micro batch: the code's 1"),
    Published(
        "30B-A3B, EP=16 DP=16, LoRA",
        78.9,
        replace(_30B, lora=True),
        "full or LoRA; micro batch: the code's 1",
    ),
]
"""48.8 and 51.2 GiB are of FSDP, which the plan does not know; 128 GiB of states and plain DDP are a test."""


class Compared(NamedTuple):
    """One measured peak and the plan's."""

    case: Case
    tokens: int
    """Of the largest pass."""
    measured_gib: float
    planned: MemoryParts


def planned(case: Case, *, tokens: int) -> MemoryParts:
    """Return the plan of a case whose largest pass has that many tokens."""
    arguments = TrainArguments(
        dtype="bfloat16",
        packing_max_tokens=tokens,
        # Or the plan would think of a whole group of longest prompts in a pass.
        rerank_max_len=16,
        train_group_size=case.group_size,
        use_lora=case.lora,
        lora_target_groups=case.lora_groups,
        gradient_checkpointing=case.recompute,
        megatron=case.megatron,
    )
    return memory(case.shape, arguments, case.layout)


def compared() -> Iterator[Compared]:
    """Yield our measured cases of the megatron backend with their plans."""
    path = RESULTS / "train_throughput.json"
    rows = {
        (one["model"], one["layout"]): one
        for one in json.loads(path.read_text())
        if one["method"] == "ours"
    }
    seen = set()
    for case in (case for name, cases in SETS.items() if name != "smoke" for case in cases):
        found = rows.get((case.model, case.label))
        if found is None or case.backend != "megatron" or case.label in seen:
            continue
        seen.add(case.label)
        # As it was packed then: packing may have become better.
        tokens = found["largest_pass_tokens"]
        yield Compared(case, tokens, found["peak_gib"], planned(case, tokens=tokens))


def tables() -> str:
    """Return both tables."""
    lines = [
        "| model | layout | largest pass | plan GiB | measured GiB | plan / measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in compared():
        total = one.planned.total / GIB
        lines.append(
            f"| {one.case.model} | {one.case.label} | {one.tokens} tokens | {total:.1f} | {one.measured_gib:.1f} "
            f"| {total / one.measured_gib:.2f} |"
        )
    lines += [
        "",
        "| the paper's | published GiB | plan GiB, longest prompts | and full logits | not said |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, gib, case, left_out in PAPER:
        tokens = case.micro_batch * case.group_size * 512
        total = planned(case, tokens=tokens).total / GIB
        logits = tokens * case.shape.vocab / case.tensor * LOGIT_BYTES / GIB
        lines.append(f"| {what} | {gib} | {total:.1f} | {total + logits:.1f} | {left_out} |")
    return "\n".join(lines)


def main() -> int:
    """Write the tables into the page, or check them."""
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    text = f"{before}{START}\n{tables()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if text != page:
            print("docs/megatron.md: run `python benchmarks/plan_peaks.py`", file=sys.stderr)
        return int(text != page)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
