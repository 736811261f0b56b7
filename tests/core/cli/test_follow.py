"""What is shown of events, line by line."""

from datetime import UTC, datetime

import pytest
from tests.core.cli.test_output import job

from tevatron.core.cli.follow import Lines, all_succeeded, describe
from tevatron.core.contracts.jobs import EventType, JobEvent

TIME = datetime(2026, 1, 1, 12, 30, 5, tzinfo=UTC)


def event(kind: str, **data) -> JobEvent:
    return JobEvent(seq=1, time=TIME, attempt=1, type=EventType(kind), data=data)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (event("state", state="running"), "running"),
        (
            event("state", state="failed", reason="data_error", message="line 17"),
            "failed (data_error: line 17)",
        ),
        (event("phase", phase="training"), "training"),
        (event("progress", done=3, total=40, unit="steps"), "3/40 steps"),
        (event("metrics", step=3, loss=0.123456), "step=3 loss=0.1235"),
        (event("log", level="warning", message="slow"), "warning: slow"),
    ],
)
def test_event_is_one_line(given, shown):
    assert describe(given) == shown


def test_progress_and_steps_are_thinned_out_but_never_the_last(capsys):
    view = Lines()
    steps = [event("progress", done=done, total=3, unit="steps") for done in (1, 2, 3)]
    losses = [event("metrics", step=step, loss=1.0 / step) for step in (1, 2, 4)]
    view.show(job(), [*losses, *steps[:2]])
    view.show(job(), [steps[2], event("metrics", **{"ndcg@10": 0.5})])
    assert capsys.readouterr().err.splitlines() == [
        "12:30:05 fit: step=1 loss=1",
        "12:30:05 fit: 1/3 steps",
        "12:30:05 fit: step=4 loss=0.25",
        "12:30:05 fit: 3/3 steps",
        "12:30:05 fit: ndcg@10=0.5",
    ]


def test_a_loss_that_was_shown_is_not_shown_again(capsys):
    view = Lines()
    view.show(job(), [event("metrics", step=1, loss=1.0), event("phase", phase="saving")])
    view.EVERY_S = 0.0
    view.show(job(), [event("metrics", step=2, loss=0.5), event("state", state="succeeded")])
    assert capsys.readouterr().err.splitlines() == [
        "12:30:05 fit: step=1 loss=1",
        "12:30:05 fit: saving",
        "12:30:05 fit: step=2 loss=0.5",
        "12:30:05 fit: succeeded",
    ]


def test_one_job_that_did_not_succeed_is_enough():
    assert all_succeeded([job(), job()])
    assert not all_succeeded([job(), job(state="cancelled")])
