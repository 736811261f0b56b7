"""Run the tests and say last which of them were skipped, and why: `python scripts/test.py [pytest's arguments]`.

As many at a time as there are cores; `-n 0` runs them one by one, in this process.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

NUM_WORKERS = min(os.cpu_count() or 1, 8)
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
    skipped = SkippedTests()
    # tests/conftest.py says what is shared out, and in which order.
    arguments = [f"--numprocesses={NUM_WORKERS}", "--no-loadscope-reorder", *sys.argv[1:]]
    status = pytest.main(arguments, plugins=[skipped])
    listed = "; ".join(f"{count} ({reason})" for reason, count in sorted(skipped.reasons.items()))
    print(f"tests skipped on this machine: {listed or 'none'}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
