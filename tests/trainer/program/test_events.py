"""Events: one JSON line each, from rank 0; a failure from any rank; never a reason to stop."""

import json

from tevatron.core.contracts.jobs import FailReason, Phase
from tevatron.core.contracts.run import RunEvent
from tevatron.trainer.program.events import EventWriter


def lines(folder):
    return [
        RunEvent.model_validate_json(line)
        for line in (folder / "events.jsonl").read_text().splitlines()
    ]


def test_lines_are_run_events(tmp_path):
    events = EventWriter(tmp_path, rank=0)
    events.phase(Phase.TRAINING)
    events.metrics({"step": 1, "loss": 0.5, "grad_norm": float("nan")})
    events.progress(1, 10, unit="steps")
    events.state_saved(1)
    events.stopped(None)
    got = [(event.type.value, event.data) for event in lines(tmp_path)]
    assert got == [
        ("phase", {"phase": "training"}),
        ("metrics", {"step": 1, "loss": 0.5, "grad_norm": None}),
        ("progress", {"done": 1, "total": 10, "unit": "steps"}),
        ("state_saved", {"step": 1}),
        ("stopped", {"step": None}),
    ]


def test_other_ranks_report_failures_only(tmp_path):
    events = EventWriter(tmp_path, rank=1)
    events.phase(Phase.LOADING)
    events.failed(FailReason.OUT_OF_MEMORY, "too big")
    (only,) = lines(tmp_path)
    assert only.data == {
        "reason": "out_of_memory",
        "phase": "loading",
        "message": "too big",
        "rank": 1,
    }


def test_a_folder_that_is_gone_stops_nothing(tmp_path, caplog):
    EventWriter(tmp_path / "gone", rank=0).phase(Phase.TRAINING)
    assert "cannot be written" in caplog.text


def test_no_line_has_nan(tmp_path):
    EventWriter(tmp_path, rank=0).metrics({"loss": float("inf")})
    text = (tmp_path / "events.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0)["data"] == {"loss": None}
