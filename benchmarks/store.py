"""What Postgres pays for jobs, scorers and evaluations as they grow; docs/scaling.md does its arithmetic with this.

python benchmarks/store.py      its own Postgres (fsync on) and Valkey; no API, no workers
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml
from pydantic import SecretStr
from record import row, write_rows
from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from tevatron.api.dispatcher import Dispatcher
from tevatron.core.cli.stack.postgres import EmbeddedPostgres
from tevatron.core.cli.stack.valkey import EmbeddedValkey
from tevatron.core.contracts.jobs import EvalJob, JobKind, TrainJob
from tevatron.core.settings import Settings
from tevatron.core.store.claims import claim_next_job, heartbeat, look
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import DatasetKind, Evaluation, JobEventRow
from tevatron.core.store.nudges import NudgeListener
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.scorers import (
    ScorerTarget,
    beat_scorer,
    claim_next_scorer,
    request_scorer,
)
from tevatron.core.store.session import Sessions, make_engine, make_sessions, migrate
from tevatron.core.worker.celery_app import make_celery
from tevatron.evaluator.benchmarks import BENCHMARKS

LEASE_S = 3600.0
BEATS_S = 5.0
CLIENTS = 8
EVENTS = 100_000
TRIGGER = Path(__file__).parent.parent / "k8s/components/autoscaling/trainer.yaml"

Rows = list[dict[str, object]]


@contextmanager
def own_store(folder: Path) -> Iterator[tuple[Sessions, Settings]]:
    """Run Postgres and Valkey with an empty schema, a model and two datasets."""
    with ExitStack() as stack:
        postgres, valkey = EmbeddedPostgres(folder / "postgres"), EmbeddedValkey(folder / "valkey")
        url = postgres.start()
        stack.callback(postgres.stop)
        broker = valkey.start()
        stack.callback(valkey.stop)
        migrate(url)
        engine = make_engine(url, pool_size=CLIENTS)
        stack.callback(engine.dispose)
        sessions = make_sessions(engine)
        with sessions.begin() as session:
            ModelRepository(session).create(
                "base", key_id=None, path="models/base", sha256="0" * 64
            )
            for name, kind in (("train", DatasetKind.TRAINING), ("corpus", DatasetKind.BEIR)):
                DatasetRepository(session).create(
                    name, key_id=None, kind=kind, path=name, sha256="0" * 64, stats={}
                )
        yield sessions, Settings(database_url=SecretStr(url), broker_url=SecretStr(broker))


def submit(sessions: Sessions, count: int, spec: TrainJob | EvalJob) -> list[str]:
    """Queue `count` jobs alike."""
    found: list[str] = []
    while len(found) < count:
        batch = {f"job-{number}": spec for number in range(min(500, count - len(found)))}
        with sessions.begin() as session:
            found += [job.id for job in JobRepository(session).submit(batch, key_id=None)]
    return found


def milliseconds(
    sessions: Sessions, work: Callable[[Session], object], *, count: int = 300
) -> float:
    """Return the median time of a transaction of one client."""
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        with sessions.begin() as session:
            work(session)
        taken.append((time.perf_counter() - started) * 1000)
    return round(statistics.median(taken), 3)


def measure_polls(sessions: Sessions) -> Rows:
    """What a running job and a served scorer ask of the database, and how many beats it takes at once."""
    submit(sessions, 1, TrainJob(model="base", dataset="train"))
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=LEASE_S)
        model_id = ModelRepository(session).get("base", key_id=None).id
        for _ in range(CLIENTS):
            request_scorer(session, ScorerTarget(model_id=model_id), key_id=None)
    assert claim is not None
    scorers = []
    for _ in range(CLIENTS):
        with sessions.begin() as session:
            scorer = claim_next_scorer(session, host="h", lease_s=LEASE_S)
            assert scorer is not None
            scorers.append(scorer)
    once = (
        ("a running job's look, one a second", lambda session: look(session, claim)),
        (
            "a running job's heartbeat, one in 10 s",
            lambda session: heartbeat(session, claim, LEASE_S),
        ),
        (
            "a scorer's beat, one a second",
            lambda session: beat_scorer(session, scorers[0], LEASE_S),
        ),
    )
    rows = [
        row(
            name=name,
            method="ours",
            layout="one client",
            value=milliseconds(sessions, work),
            unit="ms",
        )
        for name, work in once
    ]
    done = [0] * CLIENTS

    def beat(client: int) -> None:
        end = time.monotonic() + BEATS_S
        while time.monotonic() < end:
            with sessions.begin() as session:
                beat_scorer(session, scorers[client], LEASE_S)
            done[client] += 1

    threads = [threading.Thread(target=beat, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = round(sum(done) / BEATS_S)
    layout = f"{CLIENTS} clients on the database's own cores"
    return [*rows, row(name="scorers' beats", method="ours", layout=layout, value=rate, unit="1/s")]


def measure_dispatcher(sessions: Sessions, settings: Settings, *, queued: int) -> Rows:
    """One step over a long queue: the first publishes each wake-up, later ones look whether any was lost."""
    submit(sessions, queued, TrainJob(model="base", dataset="train"))
    dispatcher = Dispatcher(
        sessions,
        make_celery(settings, producer=True),
        NudgeListener(sessions.kw["bind"]),
        republish_s=3600.0,
        poll_s=1.0,
    )
    return [
        _step(dispatcher, layout="first step", queued=queued),
        _step(dispatcher, layout="a later step, all due again", queued=_age(sessions)),
    ]


def _step(dispatcher: Dispatcher, *, layout: str, queued: int) -> dict[str, object]:
    started = time.perf_counter()
    dispatcher.step()
    taken = round(time.perf_counter() - started, 2)
    name = f"dispatcher, {queued} queued jobs"
    return row(name=name, method="ours", layout=layout, value=taken, unit="s")


def _age(sessions: Sessions) -> int:
    """Make every queued job due again, and count them."""
    old = "UPDATE jobs SET published_at = now() - interval '2 hours' WHERE state = 'queued' AND kind = 'train'"
    with sessions.begin() as session:
        return int(session.execute(text(old)).rowcount)  # type: ignore[attr-defined]


def measure_evaluations(sessions: Sessions) -> Rows:
    """The rows of one system on BEIR-15: a job and an evaluation for each data set, a value a query and metric."""
    metrics = EvalJob(dataset="corpus").metrics
    sets = BENCHMARKS["beir15"].datasets
    jobs = submit(sessions, len(sets), EvalJob(dataset="corpus"))
    with sessions.begin() as session:
        dataset_id = DatasetRepository(session).get("corpus", key_id=None).id
    before, started, count = _size(sessions, "evaluation_values"), time.perf_counter(), 0
    for job_id, dataset in zip(jobs, sets, strict=True):
        values = [
            Value(metric, f"{dataset.name}-{query}", 0.5)
            for metric in metrics
            for query in range(dataset.num_queries or 0)
        ]
        count += len(values)
        evaluation = Evaluation(
            id=f"evaluation-{job_id}",
            job_id=job_id,
            dataset_id=dataset_id,
            split="test",
            first_stage={},
            metrics=dict.fromkeys(metrics, 0.5),
            num_queries=dataset.num_queries or 0,
            variant="benchmark",
            run_sha256="0" * 64,
            qrels_sha256="0" * 64,
        )
        with sessions.begin() as session:
            EvaluationRepository(session).add(evaluation, values)
    taken = time.perf_counter() - started
    size = _size(sessions, "evaluation_values") - before
    name = f"one system on BEIR-15, {len(sets)} data sets, {len(metrics)} metrics"
    return [
        row(name=name, method="ours", layout="values of queries", value=count, unit="rows"),
        row(
            name=name,
            method="ours",
            layout="with its index",
            value=round(size / count),
            unit="bytes a row",
        ),
        row(name=name, method="ours", layout="written", value=round(count / taken), unit="rows/s"),
    ]


def measure_events(sessions: Sessions) -> Rows:
    """What a line of a job's history weighs: the metrics of a training step."""
    (job_id,) = submit(sessions, 1, EvalJob(dataset="corpus"))
    before = _size(sessions, "job_events")
    data = {"step": 1000, "loss": 0.12345678, "learning_rate": 1e-5, "grad_norm": 1.2345678}
    data |= {"pairs_per_s": 123.45, "tokens_per_s": 45678.9, "epoch": 0.5}
    with sessions.begin() as session:
        now = session.scalar(text("SELECT now()"))
        session.execute(
            insert(JobEventRow),
            [
                {
                    "job_id": job_id,
                    "seq": seq,
                    "time": now,
                    "attempt": 1,
                    "type": "metrics",
                    "data": data,
                }
                for seq in range(1000, 1000 + EVENTS)
            ],
        )
    size = round((_size(sessions, "job_events") - before) / EVENTS)
    return [
        row(name="an event", method="ours", layout="with its index", value=size, unit="bytes a row")
    ]


def measure_history(sessions: Sessions, *, finished: int) -> Rows:
    """What is asked all the time, over a table full of jobs that are over and a long queue."""
    with sessions.begin() as session:
        session.execute(
            text(
                "INSERT INTO jobs (id, kind, state, spec, resolved, created_at, started_at, finished_at) "
                "SELECT 'old-' || n, CASE n % 3 WHEN 0 THEN 'train' ELSE 'eval' END, 'succeeded', "
                "(SELECT spec FROM jobs LIMIT 1), (SELECT resolved FROM jobs LIMIT 1), "
                "now() - n * interval '8.64 s', now(), now() FROM generate_series(1, :count) n"
            ),
            {"count": finished},
        )
    with (
        sessions.kw["bind"].connect().execution_options(isolation_level="AUTOCOMMIT") as connection
    ):
        connection.execute(text("VACUUM ANALYZE jobs"))
    trigger = yaml.safe_load(TRIGGER.read_text())["spec"]["triggers"][0]["metadata"]["query"]
    layout = f"{finished} finished jobs"
    asked: tuple[tuple[str, Callable[[Session], object], int], ...] = (
        ("KEDA's question", lambda session: session.scalar(text(trigger)), 50),
        ("the jobs of /metrics", lambda session: JobRepository(session).count_by_state(), 20),
        (
            "a claim",
            lambda session: claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=LEASE_S),
            100,
        ),
        ("a page of jobs", lambda session: JobRepository(session).list_page(key_id=None), 50),
    )
    rows = [
        row(
            name=name,
            method="ours",
            layout=layout,
            value=milliseconds(sessions, work, count=count),
            unit="ms",
        )
        for name, work, count in asked
    ]
    size = round(_size(sessions, "jobs") / finished)
    return [
        *rows,
        row(name="a job", method="ours", layout="with its indexes", value=size, unit="bytes a row"),
    ]


def _size(sessions: Sessions, table: str) -> int:
    with sessions.begin() as session:
        size: int = session.scalar(text("SELECT pg_total_relation_size(:name)"), {"name": table})
    return size


def _shown(rows: Rows) -> Rows:
    for entry in rows:
        print(f"{entry['name']}, {entry['layout']}: {entry['value']} {entry['unit']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--finished", type=int, default=300_000, help="a month of 10,000 a day")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tevatron-bench-") as folder,
        own_store(Path(folder)) as (sessions, settings),
    ):
        rows: Rows = []
        for part in (
            lambda: measure_polls(sessions),
            lambda: measure_evaluations(sessions),
            lambda: measure_events(sessions),
            lambda: measure_dispatcher(sessions, settings, queued=arguments.queued),
            lambda: measure_history(sessions, finished=arguments.finished),
        ):
            rows += _shown(part())
    print(write_rows("store", rows, packages=("sqlalchemy", "psycopg", "celery")))


if __name__ == "__main__":
    main()
