"""The plan against peaks that were measured on two H200s, and the page that shows them."""

import subprocess
import sys
from pathlib import Path

import plan_peaks
import pytest

from tevatron.core.contracts.plan import GIB

ROOT = Path(__file__).parents[2]


def test_every_measured_peak_is_met_within_a_tenth():
    found = [one for one in plan_peaks.compared() if one.measured_gib is not None]
    for backend in ("megatron", "hf"):
        assert sum(one.case.backend == backend for one in found) >= 5
    for one in found:
        assert one.planned.total / GIB == pytest.approx(one.measured_gib, rel=0.1)


def test_what_ran_out_of_memory_is_planned_above_a_gpu():
    found = [one for one in plan_peaks.compared() if one.measured_gib is None]
    assert len(found) == 4
    for one in found:
        assert one.planned.total / GIB > 139


def test_logits_of_the_whole_vocabulary_come_on_top():
    found = [row for row in plan_peaks.PAPER if row.what.startswith("ours")]
    assert len(found) == 2
    for row in found:
        total, logits = plan_peaks.padded_gib(row.case, logit_bytes=row.logit_bytes)
        assert total + logits == pytest.approx(row.gib, rel=0.1)


def test_the_page_shows_them():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "plan_peaks.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
