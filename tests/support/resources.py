"""One row of every resource of the API for a key, as finished jobs would have left them."""

from __future__ import annotations

from sqlalchemy.orm import Session
from tests.support.store import eval_job, publish_checkpoint, register, train_job

from tevatron.core.ids import new_id
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import DatasetKind, Evaluation
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.scorers import (
    ScorerTarget,
    claim_next_scorer,
    request_scorer,
    scorer_ready,
)
from tevatron.core.store.webhooks import WebhookRepository

TOKEN = "canary-token-of-the-scorer"


def make_resources(session: Session, *, key_id: str | None) -> dict[str, str]:
    """Return the ids by kind: job, model, dataset, awaiting, checkpoint, scorer, evaluation, webhook."""
    register(session, key_id=key_id)
    jobs = JobRepository(session).submit(
        {"tune": train_job("tune"), "table": eval_job("table")}, key_id=key_id
    )
    checkpoint = publish_checkpoint(session, jobs[0].id, name="tune", key_id=key_id)
    awaiting = DatasetRepository(session).create("later", key_id=key_id, kind=DatasetKind.RANKLIST)
    scorer = request_scorer(
        session, ScorerTarget(checkpoint_id=checkpoint), key_id=key_id, name="served", ttl_s=60.0
    )
    claim = claim_next_scorer(session, host="host-1", lease_s=60.0)
    assert claim is not None
    scorer_ready(session, claim, url="http://127.0.0.1:9", token=TOKEN, info={})
    corpus = DatasetRepository(session).get("corpus", key_id=key_id)
    evaluation = Evaluation(
        id=new_id("eval"),
        name="table",
        key_id=key_id,
        job_id=jobs[1].id,
        dataset_id=corpus.id,
        split="test",
        first_stage={"kind": "bm25"},
        rerank=None,
        metrics={"ndcg@10": 0.5, "recall@10": 0.75},
        num_queries=2,
        variant="pytrec_eval, missing queries 0",
        run_sha256="3" * 64,
        qrels_sha256="4" * 64,
    )
    EvaluationRepository(session).add(
        evaluation,
        [
            Value(metric, query_id, value)
            for metric, query_id, value in (
                ("ndcg@10", "q1", 1.0),
                ("ndcg@10", "q2", 0.0),
                ("recall@10", "q1", 0.5),
                ("recall@10", "q2", 1.0),
            )
        ],
    )
    webhook = WebhookRepository(session).create(
        "https://hooks.example/", key_id=key_id, name="told"
    )
    session.flush()
    return {
        "job": jobs[0].id,
        "model": ModelRepository(session).get("base", key_id=key_id).id,
        "dataset": corpus.id,
        "awaiting": awaiting.id,
        "checkpoint": checkpoint,
        "scorer": scorer,
        "evaluation": evaluation.id,
        "webhook": webhook.id,
    }
