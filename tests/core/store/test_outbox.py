"""What moves jobs that nobody holds: due wake-ups, dependencies, and the jobs of dead workers."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from tests.core.store.test_claims import cancel, claim, do, end_lease
from tests.support.store import eval_job, job, publish_checkpoint, states, submit, train_job

from tevatron.core.contracts.jobs import AnnotateJob, ExportJob, FailReason, JobKind
from tevatron.core.store.claims import fail, succeed
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.outbox import due_jobs, mark_published, reap, settle_waiting


def pipeline(sessions):
    """train -> export -> eval of the export, and an eval of the train."""
    return submit(
        sessions,
        tune=train_job(),
        half=ExportJob.model_validate({"train": {"from": "tune"}, "dtype": "float16"}),
        after=eval_job(rerank={"checkpoint": {"from": "half"}}),
        direct=eval_job(rerank={"checkpoint": {"from": "tune"}}),
    )


def succeed_with_checkpoint(sessions, held):
    with sessions.begin() as session:
        succeed(session, held, {})
        publish_checkpoint(session, held.job_id, name=held.name)


def test_a_queued_job_is_due_until_it_was_published_and_again_when_that_is_old(sessions):
    first, second = submit(sessions, a=train_job(), b=eval_job())
    assert do(sessions, due_jobs, 15.0) == [(first, "train", False), (second, "eval", False)]
    do(sessions, mark_published, [first])
    assert do(sessions, due_jobs, 15.0) == [(second, "eval", False)]
    with sessions.begin() as session:
        session.execute(text("UPDATE jobs SET published_at = published_at - interval '16 s'"))
    assert do(sessions, due_jobs, 15.0) == [(first, "train", True), (second, "eval", False)]


def test_a_claimed_job_is_not_due_and_a_released_one_is_at_once(sessions):
    [job_id] = submit(sessions, a=train_job())
    do(sessions, mark_published, [job_id])
    claim(sessions)
    assert do(sessions, due_jobs, 0.0) == []
    end_lease(sessions)
    do(sessions, reap, grace_s=0.0, max_attempts=5)
    assert do(sessions, due_jobs, 15.0) == [(job_id, "train", False)]


def test_two_dispatchers_do_not_publish_the_same_row(sessions):
    submit(sessions, a=train_job(), b=train_job())
    with sessions.begin() as one, sessions.begin() as two:
        assert len(due_jobs(one, 15.0)) == 2
        assert due_jobs(two, 15.0) == []


def test_a_dependent_job_waits_and_then_gets_the_ids_of_what_its_sources_made(sessions):
    tune, half, after, direct = pipeline(sessions)
    assert [job(sessions, one).state for one in (tune, half, after, direct)] == [
        "queued",
        "waiting",
        "waiting",
        "waiting",
    ]
    assert do(sessions, settle_waiting) == []
    succeed_with_checkpoint(sessions, claim(sessions, JobKind.TRAIN))
    assert do(sessions, settle_waiting) == [half, direct]
    assert job(sessions, half).resolved["train"] == tune
    assert job(sessions, half).spec["train"] == {"from": "tune"}
    assert job(sessions, direct).resolved["rerank"]["checkpoint"] == tune.replace("job_", "ckpt_")
    assert job(sessions, after).state == "waiting"
    succeed_with_checkpoint(sessions, claim(sessions, JobKind.EXPORT))
    assert do(sessions, settle_waiting) == [after]
    held = [claim(sessions, JobKind.EVAL) for _ in range(2)]
    assert {one.spec.rerank.checkpoint for one in held} == {
        half.replace("job_", "ckpt_"),
        tune.replace("job_", "ckpt_"),
    }
    assert states(sessions, after) == ["waiting", "queued", "starting"]


def test_a_failed_source_fails_what_waits_for_it_and_what_waits_for_that(sessions):
    tune, half, after, direct = pipeline(sessions)
    do(sessions, fail, claim(sessions), reason=FailReason.DATA_ERROR, message="line 17")
    assert do(sessions, settle_waiting) == [half, direct]
    assert do(sessions, settle_waiting) == [after]
    row = job(sessions, direct)
    assert (row.state, row.reason) == ("failed", "dependency_failed")
    assert row.message == f"source job 'tune' ({tune}) is failed"
    assert job(sessions, after).message == f"source job 'half' ({half}) is failed"


def test_a_cancelled_source_fails_what_waits_for_it(sessions):
    tune, half, _after, _direct = pipeline(sessions)
    cancel(sessions, tune)
    do(sessions, settle_waiting)
    assert job(sessions, half).message == f"source job 'tune' ({tune}) is cancelled"


def test_a_waiting_job_can_be_cancelled(sessions):
    _tune, half, after, _direct = pipeline(sessions)
    assert cancel(sessions, half) == "cancelled"
    assert do(sessions, settle_waiting) == [after]
    assert job(sessions, after).reason == "dependency_failed"


def test_a_source_that_published_nothing_fails_its_eval(sessions):
    tune, _half, _after, direct = pipeline(sessions)
    do(sessions, succeed, claim(sessions), {})
    do(sessions, settle_waiting)
    assert (
        job(sessions, direct).message == f"source job 'tune' ({tune}) has published no checkpoint"
    )


def test_a_dead_workers_job_runs_again(sessions):
    [job_id] = submit(sessions, a=train_job())
    claim(sessions)
    assert do(sessions, reap, grace_s=0.0, max_attempts=5).requeued == []
    end_lease(sessions)
    assert do(sessions, reap, grace_s=7200.0, max_attempts=5).requeued == []
    assert do(sessions, reap, grace_s=60.0, max_attempts=5).requeued == [job_id]
    row = job(sessions, job_id)
    assert (row.state, row.lost_attempts, row.holder) == ("queued", 1, None)
    assert row.message == "attempt 1 was lost: nothing was heard of w1"
    assert claim(sessions).attempt == 2


def test_the_third_lost_attempt_of_three_fails_the_job(sessions):
    [job_id] = submit(sessions, a=train_job())
    for _ in range(3):
        claim(sessions)
        end_lease(sessions)
        done = do(sessions, reap, grace_s=0.0, max_attempts=3)
    assert done.failed == [job_id]
    row = job(sessions, job_id)
    assert (row.state, row.reason, row.attempt) == ("failed", "worker_lost", 3)
    assert row.message == (
        "3 attempts are lost, the limit is 3; the last: attempt 3 was lost: nothing was heard of w1"
    )
    assert claim(sessions) is None


def test_a_cancelled_job_whose_worker_died_is_cancelled(sessions):
    [job_id] = submit(sessions, a=train_job())
    claim(sessions)
    cancel(sessions, job_id)
    end_lease(sessions)
    assert do(sessions, reap, grace_s=0.0, max_attempts=1).cancelled == [job_id]
    assert states(sessions, job_id) == ["queued", "starting", "cancelling", "cancelled"]


def test_the_reaper_leaves_a_row_that_its_worker_is_just_writing(sessions):
    submit(sessions, a=train_job())
    held = claim(sessions)
    end_lease(sessions)
    with sessions.begin() as session:
        succeed(session, held, {})
        assert do(sessions, reap, grace_s=0.0, max_attempts=1).failed == []


@pytest.mark.parametrize("number", [1, 50])
def test_counts_by_state(sessions, number):
    submit(sessions, **{f"j{index}": eval_job() for index in range(number)})
    claim(sessions)
    counts = do(sessions, lambda session: JobRepository(session).count_by_state())
    expected = {("eval", "starting"): 1, ("eval", "queued"): number - 1}
    assert counts == {key: count for key, count in expected.items() if count}


def test_a_waiting_job_that_this_build_cannot_read_fails_and_holds_up_no_other(sessions):
    _, half, _, direct = pipeline(sessions)
    with sessions.begin() as session:
        session.execute(
            text(
                "UPDATE jobs SET resolved = resolved || '{\"later\": 1}' WHERE id = :id"
            ).bindparams(id=half)
        )
    succeed_with_checkpoint(sessions, claim(sessions, JobKind.TRAIN))
    do(sessions, settle_waiting)
    failed = job(sessions, half)
    assert (failed.state, failed.reason) == ("failed", FailReason.CONFIG_ERROR)
    assert "cannot read the job's spec" in failed.message
    assert job(sessions, direct).state == "queued"


def annotate_job():
    return AnnotateJob.model_validate(
        {"dataset": "train", "teacher": {"model": "base", "prompt_template": "tevatron"}}
    )


def test_a_job_that_trains_on_an_annotation_waits_for_its_dataset(sessions):
    teach, tune = submit(
        sessions,
        teach=annotate_job(),
        tune=train_job(dataset={"from": "teach"}),
    )
    assert states(sessions, tune) == ["waiting"]
    held = claim(sessions, JobKind.ANNOTATE)
    assert held.job_id == teach
    with sessions.begin() as session:
        succeed(session, held, {"dataset_id": "ds_1"})
    assert do(sessions, settle_waiting) == [tune]
    assert job(sessions, tune).resolved["dataset"] == "ds_1"
    assert states(sessions, tune) == ["waiting", "queued"]


def test_a_training_waits_for_its_dataset_and_its_held_out_rows(sessions):
    _, _, both = submit(
        sessions,
        teach=annotate_job(),
        check=annotate_job(),
        both=train_job(
            dataset={"from": "teach"}, validation={"from": "check"}, arguments={"eval_steps": 2}
        ),
    )
    made = {}
    for dataset_id in ("ds_1", "ds_2"):
        assert do(sessions, settle_waiting) == []
        held = claim(sessions, JobKind.ANNOTATE)
        made[held.name] = dataset_id
        with sessions.begin() as session:
            succeed(session, held, {"dataset_id": dataset_id})
    assert do(sessions, settle_waiting) == [both]
    resolved = job(sessions, both).resolved
    assert (resolved["dataset"], resolved["validation"]) == (made["teach"], made["check"])
    # What was sent stays as it was.
    assert job(sessions, both).spec["validation"] == {"from": "check"}


def test_held_out_rows_alone_may_be_an_annotation(sessions):
    _, tune = submit(
        sessions,
        check=annotate_job(),
        tune=train_job(validation={"from": "check"}, arguments={"eval_steps": 2}),
    )
    given = job(sessions, tune).resolved["dataset"]
    held = claim(sessions, JobKind.ANNOTATE)
    with sessions.begin() as session:
        succeed(session, held, {"dataset_id": "ds_1"})
    assert do(sessions, settle_waiting) == [tune]
    resolved = job(sessions, tune).resolved
    assert (resolved["dataset"], resolved["validation"]) == (given, "ds_1")


def test_a_teacher_may_be_a_checkpoint_of_the_same_submission(sessions):
    first, teach = submit(
        sessions,
        first=train_job(),
        teach=AnnotateJob.model_validate(
            {"dataset": "train", "teacher": {"checkpoint": {"from": "first"}}}
        ),
    )
    held = claim(sessions)
    assert held.job_id == first
    succeed_with_checkpoint(sessions, held)
    do(sessions, settle_waiting)
    checkpoint = job(sessions, teach).resolved["teacher"]["checkpoint"]
    assert checkpoint.startswith("ckpt_")
