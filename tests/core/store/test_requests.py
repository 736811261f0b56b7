"""Save now, stop after this step: who may be asked, and how the worker and later attempts learn of it."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from tests.support.store import eval_job, job, submit, train_job

from tevatron.core.contracts.jobs import EventType, JobKind, Phase
from tevatron.core.errors import ConflictError, InputError
from tevatron.core.store.claims import append_events, claim_next_job, heartbeat, look, release
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.models import Dataset, JobEventRow


def claimed(sessions, phase: Phase | None):
    with sessions.begin() as session:
        held = claim_next_job(session, list(JobKind), worker="w1", lease_s=60.0)
        if phase is not None:
            append_events(session, held, [NewEvent(EventType.PHASE, {"phase": phase.value})])
    return held


def ask(sessions, what, job_id):
    with sessions.begin() as session:
        getattr(JobRepository(session), f"request_{what}")(job_id, key_id=None)


def told(sessions, job_id):
    with sessions() as session:
        rows = session.scalars(select(JobEventRow).where(JobEventRow.job_id == job_id))
        return [row.data["message"] for row in rows if row.type is EventType.LOG]


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.SAVING, Phase.EVALUATING])
def test_the_worker_of_a_training_learns_of_both(sessions, phase):
    [job_id] = submit(sessions, a=train_job())
    held = claimed(sessions, phase)
    with sessions.begin() as session:
        assert look(session, held).save_requested_at is None
    ask(sessions, "save", job_id)
    ask(sessions, "stop", job_id)
    with sessions.begin() as session:
        beat = look(session, held)
        assert heartbeat(session, held, 60.0) == beat
    row = job(sessions, job_id)
    assert beat.save_requested_at == row.save_requested_at is not None
    assert beat.stop_requested_at == row.stop_requested_at is not None
    assert not beat.cancel_requested
    assert row.state == "running"
    assert told(sessions, job_id) == [
        "asked to save its state after this step",
        "asked to end after this step and to publish",
    ]


def test_a_second_save_is_another_one_and_a_second_stop_is_not(sessions):
    [job_id] = submit(sessions, a=train_job())
    claimed(sessions, Phase.TRAINING)
    for what in ("save", "stop"):
        ask(sessions, what, job_id)
    first = job(sessions, job_id)
    for what in ("save", "stop"):
        ask(sessions, what, job_id)
    second = job(sessions, job_id)
    assert second.save_requested_at > first.save_requested_at
    assert second.stop_requested_at == first.stop_requested_at
    assert len(told(sessions, job_id)) == 3


@pytest.mark.parametrize("what", ["save", "stop"])
@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        (None, r"train job job_\w+ is starting; only a job that is training can"),
        (Phase.LOADING, r"is starting \(loading\); only"),
        (Phase.EXPORTING, r"is running \(exporting\); only"),
    ],
)
def test_a_job_that_does_not_train_yet_or_any_more_refuses(sessions, what, phase, sentence):
    [job_id] = submit(sessions, a=train_job())
    claimed(sessions, phase)
    with pytest.raises(ConflictError, match=sentence):
        ask(sessions, what, job_id)


def test_a_job_of_another_kind_refuses_whatever_its_phase(sessions):
    [job_id] = submit(sessions, a=eval_job())
    claimed(sessions, Phase.EVALUATING)
    with pytest.raises(ConflictError, match=r"eval job job_\w+ is running \(evaluating\); only"):
        ask(sessions, "save", job_id)


def test_a_later_attempt_is_to_stop_too_but_not_to_save_again(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claimed(sessions, Phase.TRAINING)
    ask(sessions, "save", job_id)
    ask(sessions, "stop", job_id)
    with sessions.begin() as session:
        release(session, held)
    again = claimed(sessions, None)
    with sessions.begin() as session:
        beat = look(session, again)
    assert beat.save_requested_at is None
    assert beat.stop_requested_at is not None


def test_a_validation_set_is_resolved_like_the_data(sessions):
    spec = train_job(validation="train", arguments={"eval_steps": 5})
    [job_id] = submit(sessions, a=spec)
    with sessions() as session:
        train = session.scalar(select(Dataset.id).where(Dataset.name == "train"))
    assert job(sessions, job_id).resolved["validation"] == train


def test_a_validation_set_of_another_kind_is_refused(sessions):
    submit(sessions, a=train_job())
    spec = train_job(validation="corpus", arguments={"eval_steps": 5})
    with pytest.raises(InputError, match="corpus"):
        submit(sessions, b=spec)
