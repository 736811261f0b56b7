"""Memory of the idle stack: the proportional set size (PSS) of all its processes, summed.

make bench-memory
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil
from record import row, write_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402

from tevatron.core.cli.client import read_stack_file  # noqa: E402

SETTLE_S = 15.0
TARGET_MB = 700


def main() -> None:
    """Measure and write benchmarks/results/memory.json."""
    with tempfile.TemporaryDirectory(prefix="tevatron-bench-") as folder:
        home = Path(folder)
        with demo.running_stack(home, roots=[home]):
            time.sleep(SETTLE_S)
            found = _measure(home)
    found["all"] = sum(found.values())
    rows = [
        row(
            name="memory of the idle stack",
            method="ours",
            layout=name,
            value=round(bytes_ / 1e6, 1),
            unit="MB (PSS)",
        )
        for name, bytes_ in sorted(found.items(), key=lambda entry: -entry[1])
    ]
    for entry in rows:
        print(f"{entry['layout']:<12} {entry['value']:7.1f} MB")
    print(write_rows("memory", rows))
    if found["all"] > TARGET_MB * 1e6:
        sys.exit(f"expected less than {TARGET_MB} MB, got {found['all'] / 1e6:.0f} MB")


def _measure(home: Path) -> dict[str, int]:
    """Return bytes by service; a process that belongs to none of them counts as `up`."""
    stack = read_stack_file(home)
    assert stack is not None
    supervisor = psutil.Process(int(str(stack["pid"])))
    pids = stack["pids"]
    assert isinstance(pids, dict)
    services = {int(str(pid)): name for name, pid in pids.items()}
    found = dict.fromkeys(["up", *services.values()], 0)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        owner = next(
            (
                services[entry.pid]
                for entry in [process, *process.parents()]
                if entry.pid in services
            ),
            "up",
        )
        found[owner] += process.memory_full_info().pss
    return found


if __name__ == "__main__":
    main()
