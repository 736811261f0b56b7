"""Write a benchmark's rows to `benchmarks/results/<name>.json`; `render.py` makes docs/benchmarks.md of them.

Every benchmark uses `write_rows`, so that each figure carries machine, versions, date and command.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row(
    *,
    name: str,
    method: str,
    value: float,
    unit: str,
    model: str = "",
    layout: str = "",
    **more: object,
) -> dict[str, object]:
    """One measured figure; `method` is `reference`, `ours` or a peer's name."""
    return {
        "name": name,
        "model": model,
        "layout": layout,
        "method": method,
        "value": value,
        "unit": unit,
        **more,
    }


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of one file of results."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def machine() -> str:
    """The processor, its cores as this process sees them, and memory in GiB."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {pages / 2**30:.0f} GiB"


def surroundings(packages: tuple[str, ...] = (), *, gpus: str = "none") -> dict[str, object]:
    """Say what and when this process measures: gpus, machine, versions, date and command."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "gpus": gpus,
        "machine": machine(),
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python benchmarks/{shlex.join(arguments)}",
    }


def write_rows(
    name: str,
    rows: list[dict[str, object]],
    *,
    packages: tuple[str, ...] = (),
    gpus: str = "none",
    measured: dict[str, object] | None = None,
) -> Path:
    """Add the surroundings to each row and write them; returns the file. `measured` are those of another machine."""
    common = measured or surroundings(packages, gpus=gpus)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([{**entry, **common} for entry in rows], indent=1) + "\n")
    return path
