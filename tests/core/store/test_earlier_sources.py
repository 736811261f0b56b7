"""`{from: id}`: a job uses the output of one that was submitted before, alone or in another group."""

from __future__ import annotations

import pytest
from tests.core.store.test_claims import claim, do
from tests.core.store.test_outbox import succeed_with_checkpoint
from tests.support.store import eval_job, job, register, submit, train_job

from tevatron.core.contracts.jobs import ExportJob, FailReason, JobKind
from tevatron.core.errors import ConfigError
from tevatron.core.store.claims import fail
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.outbox import settle_waiting
from tevatron.core.store.repository import EveryKey


def send(sessions, key_id=None, **specs) -> list[str]:
    with sessions.begin() as session:
        return [row.id for row in JobRepository(session).submit(specs, key_id=key_id)]


def reranked(source: str):
    return eval_job(rerank={"checkpoint": {"from": source}})


def export(source: str, **fields):
    return ExportJob.model_validate({"train": {"from": source}, **fields})


def test_it_waits_for_a_job_of_an_earlier_submission_and_gets_its_checkpoint(sessions):
    [tune] = submit(sessions, tune=train_job())
    [half] = send(sessions, half=export(tune))
    [after] = send(sessions, after=reranked(half))
    assert [job(sessions, one).state for one in (half, after)] == ["waiting", "waiting"]
    with sessions() as session:
        sources = JobRepository(session).sources_of([half, after])
    assert sources == {half: [tune], after: [half]}
    for kind in (JobKind.TRAIN, JobKind.EXPORT):
        succeed_with_checkpoint(sessions, claim(sessions, kind))
        do(sessions, settle_waiting)
    assert job(sessions, half).resolved["train"] == tune
    assert claim(sessions, JobKind.EVAL).spec.rerank.checkpoint == half.replace("job_", "ckpt_")


def test_one_that_is_over_already_is_used_at_once_and_a_failed_one_fails_what_uses_it(sessions):
    done, broken = submit(sessions, done=train_job(), broken=train_job())
    succeed_with_checkpoint(sessions, claim(sessions))
    do(sessions, fail, claim(sessions), reason=FailReason.DATA_ERROR, message="line 17")
    good, bad = send(sessions, good=reranked(done), bad=reranked(broken))
    do(sessions, settle_waiting)
    assert (job(sessions, good).state, job(sessions, bad).state) == ("queued", "failed")
    assert job(sessions, bad).reason is FailReason.DEPENDENCY_FAILED
    assert job(sessions, bad).message == f"source job 'broken' ({broken}) is failed"
    with sessions.begin() as session:
        JobRepository(session).resume(broken, key_id=None)
    assert (job(sessions, broken).state, job(sessions, bad).state) == ("queued", "waiting")


def test_a_name_of_the_same_submission_comes_before_the_names_in_an_earlier_spec(sessions):
    # The earlier export is of another `tune`, which publishes float32; float16 can be had of it all the same.
    _, half = submit(sessions, tune=train_job(arguments={"dtype": "float32"}), half=export("tune"))
    spec = eval_job(rerank={"checkpoint": {"from": half}, "dtype": "float16"})
    tune = train_job(arguments={"dtype": "bfloat16"})
    _, after = send(sessions, tune=tune, after=spec)
    assert job(sessions, after).state == "waiting"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda ids: reranked(ids[1]), "source '{1}' is of kind eval; one of kind train or export"),
        (
            lambda ids: export(ids[0], step=9),
            "step: the train job ends at step 3 \\(max_steps\\), got 9",
        ),
        (lambda ids: reranked("tune"), "unknown source job 'tune'"),
        (lambda ids: reranked("job_0"), "unknown source job 'job_0'"),
    ],
)
def test_what_the_earlier_job_cannot_give_is_refused_before_anything_is_stored(
    sessions, spec, message
):
    ids = submit(sessions, tune=train_job(arguments={"max_steps": 3}), table=eval_job())
    with pytest.raises(ConfigError, match=message.format(*ids)):
        send(sessions, last=spec(ids))
    with sessions() as session:
        assert len(JobRepository(session).list_jobs(key_id=None).items) == 2


def test_another_keys_job_is_unknown_and_an_administrator_uses_what_it_sees(sessions):
    with sessions.begin() as session:
        alice, bob = (KeyRepository(session).create(name)[0].id for name in ("alice", "bob"))
        for key_id in (alice, bob):
            register(session, key_id=key_id)
    [tune] = send(sessions, alice, tune=train_job())
    with pytest.raises(
        ConfigError, match=f"job 'mine': unknown source job '{tune}'; there are: mine"
    ):
        send(sessions, bob, mine=reranked(tune))
    [used] = send(sessions, EveryKey(own=bob), used=reranked(tune))
    assert (job(sessions, used).key_id, job(sessions, used).state) == (bob, "waiting")
