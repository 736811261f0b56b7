"""Run the tests and say last which of them were skipped, and why: `python scripts/test.py [pytest's arguments]`."""

from __future__ import annotations

import sys
from collections import Counter

import pytest


class SkippedTests:
    """Counts skipped tests by reason, as a plugin of pytest."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test, or its set-up, was skipped."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def main() -> int:
    """Run pytest in this process; the exit status is pytest's."""
    skipped = SkippedTests()
    status = pytest.main(sys.argv[1:], plugins=[skipped])
    listed = "; ".join(f"{count} ({reason})" for reason, count in sorted(skipped.reasons.items()))
    print(f"tests skipped on this machine: {listed or 'none'}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
