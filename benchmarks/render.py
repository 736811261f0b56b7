"""Render docs/benchmarks.md, and README's short table, from benchmarks/results/*.json: `python benchmarks/render.py`.

`--check` writes nothing and fails where a page is not what the results give (a test runs it).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import eight_gpus
from record import RESULTS, read_rows

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
START, END = "<!-- render: start -->", "<!-- render: end -->"
OPTIONAL = (
    "model",
    "layout",
    "tokens_per_s",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "share_of_peak",
    "peak_gib",
    "score_difference",
    "engine",
    "note",
)
HEAD = """# Benchmarks

Rendered from `benchmarks/results/*.json` by `python benchmarks/render.py`; do not edit. Each table comes from one run of
the command above it; `reference` is the way that is compared with, on the same machine and input. Rows that disappoint stay.
"""


class Line(NamedTuple):
    """A line of README's table: two rows of one file of results, by model and layout."""

    what: str
    file: str
    model: str
    ours: str
    reference: str


_TRAINED, _SCORED = "train_throughput", "score_throughput"
_PADDED = "padded, full logits, batches of 64"
SHORT = [
    Line(
        "train Qwen3-8B, all weights, 2 GPUs: Megatron, TP=2",
        _TRAINED,
        "qwen3-8b",
        "TP=2 DP=1, full, packed, 16384 tokens a pass",
        "TP=2 DP=1, full, padded, 4 queries a pass",
    ),
    Line(
        "train Qwen3-8B, all weights, 2 GPUs: Megatron, DP=2, recomputation",
        _TRAINED,
        "qwen3-8b",
        "DP=2, full, packed, 16384 tokens a pass, recompute",
        "DP=2, full, padded, 4 queries a pass, recompute",
    ),
    Line(
        "train Qwen3-30B-A3B, LoRA, 2 GPUs: Megatron, EP=2",
        _TRAINED,
        "qwen3-30b-a3b",
        "EP=2 DP=2, LoRA, packed, 16384 tokens a pass",
        "EP=2 DP=2, LoRA, padded, 1 queries a pass",
    ),
    Line(
        "train Qwen3-4B, all weights, 2 GPUs: Trainer, fully sharded",
        _TRAINED,
        "qwen3-4b",
        "hf, DP=2, FSDP2 full_shard, full, packed, 16384 tokens a pass",
        "hf, DP=2, FSDP1 full_shard, full, padded, 4 queries a pass",
    ),
    Line("score with 0.6B over HTTP: vllm", _SCORED, "qwen3-0.6b", "vllm, HTTP", _PADDED),
    Line("score with 0.6B over HTTP: hf", _SCORED, "qwen3-0.6b", "hf, HTTP", _PADDED),
    Line(
        "score with 0.6B over HTTP: hf, compiled",
        _SCORED,
        "qwen3-0.6b",
        "hf, HTTP, compiled",
        _PADDED,
    ),
    Line("score with 4B over HTTP: vllm", _SCORED, "qwen3-4b", "vllm, HTTP", _PADDED),
    Line("score with 4B over HTTP: hf", _SCORED, "qwen3-4b", "hf, HTTP", _PADDED),
]


def short_table() -> str:
    """Return README's table."""
    lines = [
        "| pairs/s on H200s | Tevatron 3 | reference | times |",
        "| --- | --- | --- | --- |",
    ]
    for line in SHORT:
        ours, reference = (_value(line, layout) for layout in (line.ours, line.reference))
        lines.append(
            f"| {line.what} | {_rate(ours)} | {_rate(reference)} | {ours / reference:.1f} |"
        )
    return "\n".join(lines)


def _value(line: Line, layout: str) -> float:
    rows = read_rows(line.file)
    (value,) = [
        row["value"] for row in rows if (row["model"], row["layout"]) == (line.model, layout)
    ]
    assert isinstance(value, float)
    return value


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _section(name: str) -> str:
    rows = read_rows(name)
    by_command: dict[str, list[dict[str, object]]] = {}
    for entry in rows:
        by_command.setdefault(str(entry["command"]), []).append(entry)
    return f"\n## {name}\n" + "".join(_table(part) for part in by_command.values())


def _table(rows: list[dict[str, object]]) -> str:
    first = rows[0]
    versions = first["versions"]
    assert isinstance(versions, dict)
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    optional = [key for key in OPTIONAL if any(row.get(key) for row in rows)]
    columns = ["name", "method", "value", "unit", *optional]
    lines = [
        f"\n`{first['command']}`\n",
        f"{first['date']}, {first['machine']}, GPUs: {first['gpus']}; {listed}\n",
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    lines += [
        "| " + " | ".join(_format(row.get(column, "")) for column in columns) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return what each page is to hold."""
    sections = (_section(path.stem) for path in sorted(RESULTS.glob("*.json")))
    before, rest = README.read_text().split(START)
    _, after = rest.split(END)
    return {
        PAGE: HEAD + "".join(sections) + eight_gpus.section(),
        README: f"{before}{START}\n{short_table()}\n{END}{after}",
    }


def main() -> int:
    """Write the pages, or check them."""
    other = {page: text for page, text in pages().items() if page.read_text() != text}
    if "--check" in sys.argv[1:]:
        for page in other:
            print(
                f"{page.relative_to(ROOT)} is not what benchmarks/results give: run `python benchmarks/render.py`",
                file=sys.stderr,
            )
        return int(bool(other))
    for page, text in other.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
