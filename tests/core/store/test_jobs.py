"""Submission: names become ids or errors, all jobs or none; the same request twice; pages; visibility."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sqlalchemy import func, select, text
from tests.core.store.test_claims import claim, do
from tests.support.store import eval_job, job, publish_checkpoint, register, submit, train_job

from tevatron.core.contracts.jobs import ExportJob
from tevatron.core.errors import (
    ConfigError,
    ConflictError,
    ContractError,
    InputError,
    NotFoundError,
    PromptError,
)
from tevatron.core.store.claims import succeed
from tevatron.core.store.idempotency import IdempotencyKeyReusedError
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import IdempotencyKey, Job
from tevatron.core.store.repository import EveryKey
from tevatron.core.store.scorers import ScorerTarget, release_scorer, request_scorer


@pytest.fixture
def registered(sessions):
    with sessions.begin() as session:
        register(session)
    return sessions


def send(sessions, specs, *, key_id=None, idempotency=None):
    with sessions.begin() as session:
        jobs = JobRepository(session).submit(specs, key_id=key_id, idempotency=idempotency)
        return [one.id for one in jobs]


def num_jobs(sessions):
    with sessions() as session:
        return session.scalar(select(func.count()).select_from(Job))


def export_job(**fields):
    return ExportJob.model_validate(fields)


def test_a_single_spec_is_named_by_itself_or_not_at_all(registered):
    [unnamed] = send(registered, {"": train_job()})
    [named] = send(registered, {"": train_job("mine")})
    assert (job(registered, unnamed).name, job(registered, named).name) == (None, "mine")
    assert job(registered, named).group_id is None


def test_a_group_is_stored_in_its_order_under_one_group_id(registered):
    ids = send(registered, {"z": train_job(), "a": eval_job(), "m": train_job("mine")})
    assert ids == sorted(ids)
    rows = [job(registered, one) for one in ids]
    assert [row.name for row in rows] == ["z", "a", "mine"]
    assert len({row.group_id for row in rows}) == 1
    assert rows[0].group_id.startswith("group_")


def test_names_are_resolved_to_ids_and_the_submitted_spec_is_kept(registered):
    [job_id] = send(
        registered, {"": eval_job(first_stage={"kind": "ranklist", "dataset": "run", "depth": 5})}
    )
    row = job(registered, job_id)
    assert row.spec["first_stage"] == {"kind": "ranklist", "dataset": "run", "depth": 5}
    assert row.resolved["first_stage"]["dataset"].startswith("ds_")
    assert row.resolved["dataset"].startswith("ds_")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            train_job(model="bass"),
            NotFoundError,
            "unknown model 'bass'; there are: base. Did you mean 'base'?",
        ),
        (train_job(dataset="trian"), NotFoundError, "unknown dataset 'trian'"),
        (
            train_job(dataset="corpus"),
            ConfigError,
            "dataset 'corpus' is of kind beir; one of kind training is needed here",
        ),
        (
            eval_job(dataset="train"),
            ConfigError,
            "dataset 'train' is of kind training; one of kind beir is needed here",
        ),
        (
            eval_job(first_stage={"kind": "ranklist", "dataset": "corpus"}),
            ConfigError,
            "one of kind ranklist is needed here",
        ),
        (
            train_job(arguments={"prompt_template": "tevatrom"}),
            PromptError,
            "unknown prompt template 'tevatrom'",
        ),
        (eval_job(rerank={"checkpoint": "best"}), NotFoundError, "unknown checkpoint 'best'"),
        (
            eval_job(rerank={}),
            ConfigError,
            "rerank: expected exactly one of checkpoint, model and scorers, got none",
        ),
        (
            eval_job(rerank={"model": "base", "scorers": ["s"], "prompt_template": "tevatron"}),
            ConfigError,
            "expected exactly one of checkpoint, model and scorers, got model, scorers",
        ),
        (
            eval_job(rerank={"model": "base"}),
            ConfigError,
            "a model without a contract needs prompt_template",
        ),
        (
            eval_job(rerank={"model": "base", "prompt_template": "nope"}),
            PromptError,
            "unknown prompt template 'nope'",
        ),
        (
            eval_job(rerank={"checkpoint": "best", "max_length": 128}),
            ConfigError,
            "max_length belongs to a model without a contract, got one with checkpoint",
        ),
        (eval_job(rerank={"scorers": ["s"]}), NotFoundError, "unknown scorer 's'"),
        (
            eval_job(rerank={"scorers": ["s"], "dtype": "float32"}),
            ConfigError,
            "dtype is the scorer's own",
        ),
        (
            eval_job(rerank={"scorers": ["s"], "replicas": 2}),
            ConfigError,
            "replicas is the scorer's own",
        ),
        (export_job(train="job_0"), NotFoundError, "unknown job 'job_0'"),
        (
            eval_job(split="tset"),
            ConfigError,
            "split: dataset 'corpus': unknown split 'tset'; there are: dev, test. Did you mean 'test'?",
        ),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_is_stored(registered, spec, error, message):
    with pytest.raises(error) as caught:
        send(registered, {"good": train_job(), "bad": spec})
    assert message in str(caught.value)
    assert num_jobs(registered) == 0


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            {"half": export_job(train={"from": "tume"}), "tune": train_job()},
            "job 'half': unknown source job 'tume'; there are: half, tune. Did you mean 'tune'?",
        ),
        (
            {
                "tune": train_job(validation={"from": "b"}, arguments={"eval_steps": 2}),
                "b": train_job(),
            },
            "job 'tune': source 'b' is of kind train; one of kind annotate is needed here",
        ),
        (
            {"a": eval_job(), "b": eval_job(rerank={"checkpoint": {"from": "a"}})},
            "job 'b': source 'a' is of kind eval; one of kind train or export is needed here",
        ),
        (
            {"a": export_job(train={"from": "b"}), "b": export_job(train={"from": "a"})},
            "job 'a': source 'b' is of kind export; one of kind train is needed here",
        ),
        (
            {
                "tune": train_job(arguments={"max_steps": 4}),
                "half": export_job(train={"from": "tune"}, step=5),
            },
            "job 'half': step: the train job ends at step 4 (max_steps), got 5",
        ),
        (
            {"tune": train_job(), "half": export_job(train={"from": "tune"}, form="adapter")},
            "job 'half': form: 'adapter' needs a LoRA run of the hf backend with head 'yes_no', "
            "got use_lora False, backend 'hf', head 'yes_no'",
        ),
        (
            {
                "tune": train_job(arguments={"use_lora": True}),
                "half": export_job(train={"from": "tune"}, form="adapter"),
                "table": eval_job(rerank={"checkpoint": {"from": "half"}}),
            },
            "job 'table': rerank: source 'half' publishes an adapter alone, which no scorer serves",
        ),
        (
            {
                "tune": train_job(arguments={"dtype": "bfloat16", "export_dtype": "float32"}),
                "half": export_job(train={"from": "tune"}),
                "table": eval_job(rerank={"checkpoint": {"from": "half"}, "dtype": "bfloat16"}),
            },
            "job 'table': dtype: the contract has no tolerance for bfloat16: it was proved in float32",
        ),
    ],
)
def test_a_group_that_does_not_fit_together_is_refused(registered, specs, message):
    with pytest.raises(ConfigError) as caught:
        send(registered, specs)
    assert message in str(caught.value)
    assert num_jobs(registered) == 0


def test_an_export_takes_a_train_job_by_id_or_name(registered):
    [tune] = send(registered, {"tune": train_job()})
    [by_id] = send(registered, {"": export_job(train=tune)})
    [by_name] = send(registered, {"": export_job(train="tune")})
    for one in (by_id, by_name):
        assert (job(registered, one).state, job(registered, one).resolved["train"]) == (
            "queued",
            tune,
        )
    [other] = send(registered, {"other": eval_job()})
    with pytest.raises(ConfigError, match="is of kind eval; an export needs a train job"):
        send(registered, {"": export_job(train=other)})


def test_what_fits_another_jobs_output_is_taken(registered):
    lora = {"use_lora": True, "dtype": "bfloat16", "max_steps": 4}
    specs = {
        "tune": train_job(arguments=lora),
        "adapter": export_job(train={"from": "tune"}, form="adapter", step=4),
        "half": export_job(train={"from": "tune"}, dtype="float16"),
        "a": eval_job(rerank={"checkpoint": {"from": "tune"}, "dtype": "bfloat16"}),
        "b": eval_job(rerank={"checkpoint": {"from": "half"}, "dtype": "float16"}),
        "c": eval_job(rerank={"checkpoint": {"from": "half"}, "dtype": "float32"}, split="dev"),
    }
    assert len(send(registered, specs)) == 6


def test_an_export_of_a_finished_training_takes_a_step_that_was_saved(registered):
    [tune] = send(registered, {"tune": train_job()})
    held = claim(registered)
    with registered.begin() as session:
        succeed(session, held, {"saved_steps": [2, 4]})
    send(registered, {"": export_job(train=tune, step=4)})
    with pytest.raises(ConfigError, match="step: train job 'tune' has the saved steps 2, 4, got 3"):
        send(registered, {"": export_job(train="tune", step=3)})
    with pytest.raises(ConfigError, match="form: 'adapter' needs a LoRA run"):
        send(registered, {"": export_job(train="tune", form="adapter")})


def test_a_checkpoint_is_named_with_a_dtype_that_it_was_proved_in(registered):
    [tune] = send(registered, {"tune": train_job()})
    with registered.begin() as session:
        proved = {"tolerance": {"float32": 0.001, "bfloat16": 0.01}}
        publish_checkpoint(session, tune, name="tune", contract=proved)
    for dtype in (None, "float32", "bfloat16"):
        send(registered, {"": eval_job(rerank={"checkpoint": "tune", "dtype": dtype})})
    with pytest.raises(
        ContractError, match="no tolerance for float16: it was proved in bfloat16, float32"
    ):
        send(registered, {"": eval_job(rerank={"checkpoint": "tune", "dtype": "float16"})})


def test_an_adapters_checkpoint_is_not_for_a_scorer(registered):
    lora = {"use_lora": True}
    _, adapter = send(
        registered,
        {
            "tune": train_job(arguments=lora),
            "adapter": export_job(train={"from": "tune"}, form="adapter"),
        },
    )
    with registered.begin() as session:
        publish_checkpoint(session, adapter, name="adapter")
    with pytest.raises(ConfigError, match="checkpoint 'adapter' is an adapter alone"):
        send(registered, {"": eval_job(rerank={"checkpoint": "adapter"})})


def test_the_newest_of_two_checkpoints_of_one_name_is_meant(registered):
    for name in ("tune", "tune"):
        send(registered, {name: train_job()})
        held = claim(registered)
        with registered.begin() as session:
            succeed(session, held, {})
            newest = publish_checkpoint(session, held.job_id, name="tune")
    [job_id] = send(registered, {"": eval_job(rerank={"checkpoint": "tune"})})
    assert job(registered, job_id).resolved["rerank"]["checkpoint"] == newest


def test_named_scorers_must_be_live(registered):
    [tune] = send(registered, {"": train_job()})
    with registered.begin() as session:
        target = ScorerTarget(checkpoint_id=publish_checkpoint(session, tune))
        scorer = request_scorer(session, target, key_id=None, name="pool")
    [job_id] = send(registered, {"": eval_job(rerank={"scorers": ["pool"]})})
    assert job(registered, job_id).resolved["rerank"]["scorers"] == [scorer]
    do(registered, release_scorer, scorer)
    with pytest.raises(ConflictError, match="scorer 'pool' is stopped; start another"):
        send(registered, {"": eval_job(rerank={"scorers": ["pool"]})})


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float32"), ("checkpoint_id", "other"), ("max_length", 128)],
)
def test_named_scorers_must_serve_the_same(registered, field, value):
    tune, more = send(registered, {"tune": train_job(), "more": train_job()})
    with registered.begin() as session:
        target = ScorerTarget(checkpoint_id=publish_checkpoint(session, tune))
        if field == "checkpoint_id":
            value = publish_checkpoint(session, more)
        unlike = replace(target, **{field: value})
        for name, served in (("a", target), ("b", target), ("c", unlike)):
            request_scorer(session, served, key_id=None, name=name)
    send(registered, {"": eval_job(rerank={"scorers": ["a", "b"]})})
    with pytest.raises(ConfigError, match=f"the scorers differ in {field}, .* has {value}"):
        send(registered, {"": eval_job(rerank={"scorers": ["a", "b", "c"]})})


def test_the_same_idempotency_key_and_body_give_the_same_jobs(registered):
    specs = {"a": train_job(), "b": eval_job()}
    first = send(registered, specs, idempotency=("k1", "body"))
    assert send(registered, specs, idempotency=("k1", "body")) == first
    assert send(registered, specs, idempotency=("k2", "body")) != first
    assert num_jobs(registered) == 4


def test_the_same_idempotency_key_with_another_body_is_refused(registered):
    send(registered, {"": train_job()}, idempotency=("k1", "body"))
    with pytest.raises(
        IdempotencyKeyReusedError, match="'k1' was used before with another body"
    ) as e:
        send(registered, {"": eval_job()}, idempotency=("k1", "other"))
    assert (e.value.status_code, e.value.code) == (422, "idempotency_key_reused")
    assert num_jobs(registered) == 1


def test_a_refused_submission_does_not_use_up_its_idempotency_key(registered):
    with pytest.raises(NotFoundError):
        send(registered, {"": train_job(model="bass")}, idempotency=("k1", "body"))
    send(registered, {"": train_job()}, idempotency=("k1", "corrected"))
    assert num_jobs(registered) == 1


def test_idempotency_keys_of_two_api_keys_do_not_meet(registered):
    with registered.begin() as session:
        key, _ = KeyRepository(session).create("one")
        register(session, key_id=key.id)
    mine = send(registered, {"": train_job()}, key_id=key.id, idempotency=("k1", "body"))
    keyless = send(registered, {"": train_job()}, idempotency=("k1", "other body"))
    assert mine != keyless


def test_eight_concurrent_requests_with_one_idempotency_key_make_one_job(registered):
    answers: list[list[str]] = []
    start = threading.Barrier(8)

    def request():
        start.wait()
        answers.append(send(registered, {"": train_job()}, idempotency=("k1", "body")))

    threads = [threading.Thread(target=request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len({tuple(answer) for answer in answers}) == 1
    assert num_jobs(registered) == 1


def test_the_second_request_makes_the_job_when_the_first_is_rolled_back(registered):
    answers: list[list[str]] = []
    second = threading.Thread(
        target=lambda: answers.append(
            send(registered, {"": train_job()}, idempotency=("k1", "body"))
        )
    )
    with registered() as session:
        JobRepository(session).submit({"": train_job()}, key_id=None, idempotency=("k1", "body"))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        session.rollback()
    second.join()
    assert num_jobs(registered) == 1
    with registered() as session:
        assert session.scalars(select(IdempotencyKey.job_ids)).one() == answers[0]


def test_a_keys_rows_are_seen_by_this_key_and_the_administrator_only(registered):
    with registered.begin() as session:
        key, _ = KeyRepository(session).create("one")
        register(session, key_id=key.id)
    [mine] = send(registered, {"same": train_job()}, key_id=key.id)
    [keyless] = send(registered, {"same": train_job()})
    with registered() as session:
        jobs = JobRepository(session)
        assert jobs.get("same", key_id=key.id).id == mine
        assert jobs.get("same", key_id=None).id == keyless
        assert jobs.get(mine, key_id=EveryKey()).id == mine
        with pytest.raises(NotFoundError, match="unknown job"):
            jobs.get(mine, key_id=None)
        with pytest.raises(NotFoundError, match="unknown job"):
            jobs.request_cancel(keyless, key_id=key.id)
        assert [row.id for row in jobs.list_jobs(key_id=key.id).items] == [mine]
        assert {row.id for row in jobs.list_jobs(key_id=EveryKey()).items} == {mine, keyless}


def test_another_keys_dataset_is_unknown(registered):
    with registered.begin() as session:
        key, _ = KeyRepository(session).create("one")
    with pytest.raises(NotFoundError, match=r"unknown model 'base'; there is none"):
        send(registered, {"": train_job()}, key_id=key.id)


def test_pages_go_through_all_jobs_once_newest_first(sessions):
    ids = submit(sessions, **{f"j{index}": eval_job() for index in range(7)})
    seen: list[str] = []
    cursor = None
    with sessions() as session:
        for expected in (3, 3, 1):
            page = JobRepository(session).list_jobs(key_id=None, cursor=cursor, limit=3)
            assert len(page.items) == expected
            seen += [row.id for row in page.items]
            cursor = page.next_cursor
    assert cursor is None
    assert seen == ids[::-1]


def test_a_page_that_is_just_full_has_no_next_one(sessions):
    submit(sessions, a=eval_job(), b=eval_job())
    with sessions() as session:
        assert JobRepository(session).list_page(key_id=None, limit=2).next_cursor is None


def test_jobs_are_found_by_kind_state_name_and_group(sessions):
    tune, check = submit(sessions, tune=train_job(), check=eval_job())
    claim(sessions, "train")
    with sessions() as session:
        jobs = JobRepository(session)
        group = jobs.by_id(tune).group_id
        found = [
            [row.id for row in jobs.list_jobs(key_id=None, **wanted).items]
            for wanted in (
                {"kind": "eval"},
                {"state": "starting"},
                {"name": "check"},
                {"group_id": group},
                {"name": "nobody"},
            )
        ]
    assert found == [[check], [tune], [check], [check, tune], []]


@pytest.mark.parametrize(
    "cursor", ["x", "", "bm90IGEgdGltZXxqb2I=", "MjAyNi0wMS0wMXxqb2I=", "é", "AAAA"]
)
def test_a_cursor_that_nobody_gave_out_is_refused(sessions, cursor):
    with sessions() as session, pytest.raises(InputError, match="cursor: expected a `next_cursor`"):
        JobRepository(session).list_page(key_id=None, cursor=cursor)


def test_events_come_in_pages_after_a_seq(sessions):
    [job_id] = submit(sessions, a=train_job())
    claim(sessions)
    with sessions() as session:
        jobs = JobRepository(session)
        assert [event.seq for event in jobs.events_page(job_id, limit=1)] == [1]
        assert [event.seq for event in jobs.events_page(job_id, after_seq=1)] == [2]
        assert jobs.events_page(job_id, after_seq=2) == []


def test_each_job_tells_its_sources(sessions):
    tune, half = submit(sessions, tune=train_job(), half=export_job(train={"from": "tune"}))
    with sessions() as session:
        assert JobRepository(session).sources_of([tune, half]) == {half: [tune]}


def test_the_age_of_the_oldest_queued_job(sessions):
    submit(sessions, a=train_job(), b=train_job())
    with sessions.begin() as session:
        session.execute(text("UPDATE jobs SET created_at = created_at - interval '30 s'"))
        ages = JobRepository(session).oldest_queued_s()
    assert ages == {"train": pytest.approx(30, abs=5)}
