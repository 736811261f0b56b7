"""Models, datasets, checkpoints and evaluations: unique where they must be, visible to their key."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError
from tests.support.store import eval_job, publish_checkpoint, register, submit, train_job

from tevatron.core.errors import ConflictError, NotFoundError
from tevatron.core.store.checkpoints import CheckpointRepository, checkpoint_id_of
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import Checkpoint, DatasetKind, DatasetState, Evaluation
from tevatron.core.store.registered import DatasetRepository, ModelRepository


def test_a_name_is_taken_once_a_key_and_the_transaction_survives(sessions):
    with sessions.begin() as session:
        key, _ = KeyRepository(session).create("one")
        models = ModelRepository(session)
        models.create("base", key_id=None, path="models/a")
        with pytest.raises(ConflictError, match="a model named 'base' exists already"):
            models.create("base", key_id=None, path="models/b")
        models.create("base", key_id=key.id, hub_id="org/base", hub_revision="abc")
    with sessions() as session:
        assert ModelRepository(session).get("base", key_id=None).path == "models/a"
        assert ModelRepository(session).get("base", key_id=key.id).hub_id == "org/base"


@pytest.mark.parametrize("place", [{}, {"path": "models/a", "hub_id": "org/a"}])
def test_a_model_has_one_place(sessions, place):
    with pytest.raises(IntegrityError, match="ck_models_place"), sessions.begin() as session:
        ModelRepository(session).create("base", key_id=None, **place)


def test_a_dataset_whose_content_is_to_come_is_not_taken_by_a_job(sessions):
    with sessions.begin() as session:
        datasets = DatasetRepository(session)
        dataset = datasets.create("later", key_id=None, kind=DatasetKind.TRAINING)
        assert dataset.path == f"datasets/{dataset.id}/content"
        with pytest.raises(ConflictError, match="upload its content first"):
            datasets.get_of_kind("later", dataset.kind, key_id=None)
        datasets.lock_awaiting(dataset.id).state = DatasetState.READY
        session.flush()
        assert datasets.get_of_kind("later", dataset.kind, key_id=None).id == dataset.id
        with pytest.raises(ConflictError, match="has its content already"):
            datasets.lock_awaiting(dataset.id)


def test_a_row_that_is_gone_is_named(sessions):
    with sessions() as session, pytest.raises(NotFoundError, match="dataset 'ds_0' is gone"):
        DatasetRepository(session).by_id("ds_0")


def test_a_job_publishes_one_checkpoint(sessions):
    [job_id] = submit(sessions, tune=train_job())
    with sessions.begin() as session:
        published = publish_checkpoint(session, job_id, name="tune")
        assert published == checkpoint_id_of(job_id) == job_id.replace("job_", "ckpt_")
        assert CheckpointRepository(session).of_job(job_id).id == published
        assert CheckpointRepository(session).get("tune", key_id=None).id == published
    again = Checkpoint(
        id="ckpt_other", job_id=job_id, path="x", contract={}, sha256="0", size_bytes=1
    )
    with pytest.raises(IntegrityError, match="uq_checkpoints_job_id"), sessions.begin() as session:
        CheckpointRepository(session).add(again)


def evaluation(session, job_id):
    return Evaluation(
        id="eval_1",
        job_id=job_id,
        name="bm25",
        dataset_id=DatasetRepository(session).get("corpus", key_id=None).id,
        split="test",
        first_stage={"kind": "bm25", "depth": 100},
        metrics={"ndcg@10": 0.5},
        num_queries=2,
        variant="pytrec_eval, missing queries 0",
        run_sha256="3" * 64,
        qrels_sha256="4" * 64,
    )


def test_an_evaluation_keeps_every_querys_value(sessions):
    [job_id] = submit(sessions, check=eval_job())
    values = [Value("ndcg@10", f"q{index:05d}", index / 12000) for index in range(12000)]
    with sessions.begin() as session:
        row = evaluation(session, job_id)
        EvaluationRepository(session).add(row, [*values, Value("recall@10", "q00001", 1.0)])
    with sessions() as session:
        repository = EvaluationRepository(session)
        assert repository.of_job(job_id).metrics == {"ndcg@10": 0.5}
        assert repository.values("eval_1", metric="ndcg@10") == values
        assert len(repository.values("eval_1")) == 12001
        page = repository.values_after("eval_1", ("ndcg@10", "q11999"), limit=5)
        assert page == [Value("recall@10", "q00001", 1.0)]
        found = repository.list_evaluations(key_id=None, job_id=job_id, name="bm25")
        assert [row.id for row in found.items] == ["eval_1"]
        assert list(repository.list_evaluations(key_id=None, name="other").items) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1])
def test_a_value_that_is_no_metric_is_refused(sessions, value):
    [job_id] = submit(sessions, check=eval_job())

    def store():
        with sessions.begin() as session:
            row = evaluation(session, job_id)
            EvaluationRepository(session).add(row, [Value("ndcg@10", "q1", value)])

    with pytest.raises(IntegrityError, match="ck_evaluation_values_range"):
        store()
    with sessions() as session:
        assert EvaluationRepository(session).of_job(job_id) is None


def test_lists_are_the_keys_own(sessions):
    with sessions.begin() as session:
        key, _ = KeyRepository(session).create("one")
        register(session, key_id=key.id)
        datasets = DatasetRepository(session)
        datasets.create("mine", key_id=None, kind=DatasetKind.BEIR, path="x", stats={})
        assert [row.name for row in datasets.list_page(key_id=None).items] == ["mine"]
        assert len(datasets.list_page(key_id=key.id).items) == 3
