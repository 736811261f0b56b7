"""Render docs/benchmarks.md from benchmarks/results/*.json: `python benchmarks/render.py`.

`--check` writes nothing and fails where the page is not what the results give (a test runs it).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
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
    "note",
)
HEAD = """# Benchmarks

Rendered from `benchmarks/results/*.json` by `python benchmarks/render.py`; do not edit. Each table comes from one run of
the command above it; `reference` is the way that is compared with, on the same machine and input. Rows that disappoint stay.
"""


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _section(path: Path) -> str:
    rows = json.loads(path.read_text())
    by_command: dict[str, list[dict[str, object]]] = {}
    for entry in rows:
        by_command.setdefault(str(entry["command"]), []).append(entry)
    return f"\n## {path.stem}\n" + "".join(_table(part) for part in by_command.values())


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


def render() -> str:
    """Return the page."""
    return HEAD + "".join(
        _section(path) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    )


def main() -> int:
    """Write the page, or check it."""
    text = render()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print(
                "docs/benchmarks.md is not what benchmarks/results give: run `python benchmarks/render.py`",
                file=sys.stderr,
            )
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
