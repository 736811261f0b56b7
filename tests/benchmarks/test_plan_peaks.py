"""The plan against peaks that were measured on two H200s, and the page that shows them."""

import subprocess
import sys
from pathlib import Path

import plan_peaks
import pytest

from tevatron.core.contracts.plan import GIB

ROOT = Path(__file__).parents[2]


def test_every_measured_peak_is_met_within_a_tenth():
    found = {(one.case.model, one.case.label): one for one in plan_peaks.compared()}
    assert len(found) >= 3
    for one in found.values():
        assert one.planned.total / GIB == pytest.approx(one.measured_gib, rel=0.1)


def test_the_page_shows_them():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "plan_peaks.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
