"""Run the tests and say last which of them were skipped, and why: `python scripts/test.py [pytest's arguments]`.

Half as many at a time as there are cores: the processes of a test take as much as the test. `-n 2` runs two, `-n 0`
one by one, in this process.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

NUM_WORKERS = min((os.cpu_count() or 1) // 2, 8)
"""Each takes up to 3 GB with the processes of its test."""


class SkippedTests:
    """Counts skipped tests by reason, as a plugin of pytest."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test, or its set-up, was skipped."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def main() -> int:
    """Run pytest; the exit status is its own."""
    # Hundreds of processes import our sources: each would compile them anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Tiny models gain nothing by threads, which only wait for each other while other processes work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    skipped = SkippedTests()
    # tests/conftest.py says what is shared out, and in which order.
    workers = NUM_WORKERS if NUM_WORKERS > 1 else 0
    arguments = [f"--numprocesses={workers}", "--no-loadscope-reorder", *sys.argv[1:]]
    status = pytest.main(arguments, plugins=[skipped])
    listed = "; ".join(f"{count} ({reason})" for reason, count in sorted(skipped.reasons.items()))
    print(f"tests skipped on this machine: {listed or 'none'}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
