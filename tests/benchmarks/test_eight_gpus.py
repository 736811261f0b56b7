"""The cases for eight GPUs, which no machine here runs: their layouts, their plan, and the arithmetic of their table."""

import json
from dataclasses import replace

import eight_gpus
import pytest
import record
from train_throughput import SETS

from tevatron.core.contracts.train import TrainArguments, check_hf

CASES = SETS["eight"]
H200_GIB = 139


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.label}, {case.method}")
def test_a_layout_is_one_and_fits(case):
    assert case.gpus == 8
    if case.backend == "megatron":
        case.layout.check(case.shape)
    else:
        check_hf(TrainArguments(fsdp=case.fsdp), num_ranks=case.gpus)
    assert eight_gpus.plan_gib(case) < H200_GIB


def test_each_of_the_papers_rows_stands_beside_one_of_ours():
    labels = [case.label for case in CASES if case.method == "reference"]
    for start in eight_gpus.PAPER:
        assert sum(label.startswith(start) for label in labels) == 1, start


def test_what_was_measured_gives_the_epoch_and_the_scaling(tmp_path, monkeypatch):
    """1,000 pairs/s on eight GPUs where two have 260: 1.44 hours, and 125 a GPU where it was 130."""
    case = CASES[0]
    rows = [(case, 1000.0), (replace(case, gpus=2), 260.0)]
    found = [
        {"model": one.model, "layout": one.label, "method": one.method, "value": value}
        for one, value in rows
    ]
    (tmp_path / "train_throughput.json").write_text(json.dumps(found))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    lines = [line for line in eight_gpus.section().splitlines() if line.startswith("| ")]
    assert lines[2].endswith("| 1000 | 1.4 | 0.96 |")
    assert lines[3].endswith("| 106 | 8 h 55 |  |  |  |")
