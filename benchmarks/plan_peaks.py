"""The plan beside peaks that were measured, beside those that the paper prints and our re-creations of them: `python benchmarks/plan_peaks.py`.

Writes the tables into docs/plan.md; `--check` writes nothing and fails where they are not there (a test runs it).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from record import read_rows
from train_cases import LONGEST, Case
from train_throughput import SETS

from tevatron.core.contracts.plan import GIB, MemoryParts
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.plan import hf, megatron

PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
START, END = "<!-- plan_peaks: start -->", "<!-- plan_peaks: end -->"

_8B = Case(backend="megatron", method="reference", model="qwen3-8b", gpus=8)
_8B_FSDP = replace(_8B, backend="hf", recompute=True)
_30B = replace(_8B, model="qwen3-30b-a3b", gpus=16, expert=16, micro_batch=1)
_4B_FSDP = replace(_8B_FSDP, model="qwen3-4b", gpus=2, recompute=False, fsdp="full_shard")
LOGIT_BYTES = 2 + 4 + 4 + 2
"""A number of the reference's full-vocabulary logits: bf16, its fp32 copy, and the gradients of both."""
OUR_LOGIT_BYTES = 2
"""Our re-creation has them in bf16, its output before the gradient."""


class Published(NamedTuple):
    """A peak of the paper, and the case that comes closest to what it says of it."""

    what: str
    gib: float
    case: Case
    left_out: str
    """What the paper does not say."""
    logit_bytes: int = LOGIT_BYTES
    """Of a number of the logits."""


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
    Published(
        "8B, FSDP1 shard_grad_op DP=8, recompute",
        48.8,
        replace(_8B_FSDP, fsdp="shard_grad_op"),
        "micro batch: 4, as Megatron's",
    ),
    Published(
        "8B, FSDP1 full_shard DP=8, recompute",
        51.2,
        replace(_8B_FSDP, fsdp="full_shard"),
        "recompute: as in the other row; micro batch: 4, as Megatron's",
    ),
    Published("ours: 4B, FSDP1 full_shard DP=2", 133.8, _4B_FSDP, "", logit_bytes=OUR_LOGIT_BYTES),
    Published(
        "ours: 8B, FSDP1 full_shard DP=2, recompute",
        74.3,
        replace(_8B_FSDP, gpus=2, fsdp="full_shard"),
        "",
        logit_bytes=OUR_LOGIT_BYTES,
    ),
]
"""128 GiB of states and plain DDP are a test."""


class Compared(NamedTuple):
    """One measured peak and the plan's."""

    case: Case
    tokens: int
    """Of the largest pass."""
    measured_gib: float | None
    """None where memory ran out."""
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
        fsdp=case.fsdp if case.backend == "hf" else "",
        torch_compile=case.compile,
        megatron=case.megatron,
    )
    if case.backend == "megatron":
        return megatron.memory(case.shape, arguments, case.layout)
    parts = hf.memory(case.shape, arguments, num_gpus=case.gpus)
    return parts if case.optimizer_step else parts.model_copy(update={"optimizer": 0})


def padded_gib(case: Case, *, logit_bytes: int = OUR_LOGIT_BYTES) -> tuple[float, float]:
    """Return the plan of a padded pass of longest prompts, and what its logits take besides."""
    tokens = case.micro_batch * case.group_size * LONGEST
    logits = tokens * case.shape.vocab / case.tensor * logit_bytes
    return planned(case, tokens=tokens).total / GIB, logits / GIB


def compared() -> Iterator[Compared]:
    """Yield our measured cases of both backends with their plans."""
    rows = {
        (one["model"], one["layout"]): one
        for one in read_rows("train_throughput")
        if one["method"] == "ours"
    }
    seen = set()
    for case in (case for name, cases in SETS.items() if name != "smoke" for case in cases):
        found = rows.get((case.model, case.label))
        if found is None or case.method != "ours" or (case.model, case.label) in seen:
            continue
        seen.add((case.model, case.label))
        # As it was packed then, where that is known: packing may have become better.
        tokens = found.get("largest_pass_tokens") or case.largest_pass()
        peak = found["peak_gib"] if found["value"] else None
        yield Compared(case, tokens, peak, planned(case, tokens=tokens))


def tables() -> str:
    """Return both tables."""
    lines = [
        "| model | layout | largest pass | plan GiB | measured GiB | plan / measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in compared():
        total, peak = one.planned.total / GIB, one.measured_gib
        measured = f"{peak:.1f} | {total / peak:.2f}" if peak else "out of memory |"
        lines.append(
            f"| {one.case.model} | {one.case.label} | {one.tokens} tokens | {total:.1f} | {measured} |"
        )
    lines += [
        "",
        "| the reference's way | published or measured GiB | plan GiB, longest prompts | and full logits | not said |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in PAPER:
        total, logits = padded_gib(row.case, logit_bytes=row.logit_bytes)
        lines.append(
            f"| {row.what} | {row.gib} | {total:.1f} | {total + logits:.1f} | {row.left_out} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Write the tables into the page, or check them."""
    page = PAGE.read_text()
    before, rest = page.split(START)
    _, after = rest.split(END)
    text = f"{before}{START}\n{tables()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if text != page:
            print("docs/plan.md: run `python benchmarks/plan_peaks.py`", file=sys.stderr)
        return int(text != page)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
