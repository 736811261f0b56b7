"""What is shown of events, line by line."""

from datetime import UTC, datetime

import pytest
from tests.core.cli.test_output import job

from tevatron.core.cli.follow import Lines, all_succeeded, describe, follow_jobs
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


class Answers:
    """A client of jobs that end one after the other; keeps what it was asked for."""

    def __init__(self, *jobs) -> None:
        self.jobs = {one.id: one for one in jobs}
        self.asked: list[str] = []

    def job(self, job_id: str):
        self.asked.append(job_id)
        return self.jobs[job_id]

    def events(self, job_id: str, *, after: int):
        return []


def test_nobody_asks_for_a_job_whose_source_is_followed_and_not_over(monkeypatch):
    source = job(id="a", state="running")
    waiting = job(id="b", state="waiting", depends_on=["a"])
    elsewhere = job(id="c", state="succeeded", depends_on=["z"])
    answers = Answers(source, waiting, elsewhere)
    rounds = []

    def next_round(_seconds):
        rounds.append(answers.asked.copy())
        ended = "succeeded" if len(rounds) > 1 else "running"
        answers.jobs["a"] = job(id="a", state=ended)
        if len(rounds) > 2:
            answers.jobs["b"] = job(id="b", state="succeeded", depends_on=["a"])

    monkeypatch.setattr("tevatron.core.cli.follow.time.sleep", next_round)
    found = follow_jobs(answers, [source, waiting, elsewhere], quiet=True)
    assert [one.state for one in found] == ["succeeded"] * 3
    # First `a` and, for its end, `c`; then `a` alone until it is over; then `b`.
    assert answers.asked == ["a", "c", "a", "a", "b", "b"]
