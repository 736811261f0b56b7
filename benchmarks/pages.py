"""How long the dashboard's pages take with 10,000 jobs and 200 evaluations in Postgres, GET /healthz beside them, turn by turn.

python benchmarks/pages.py                  its own Postgres (fsync on), Valkey and API; rows as finished jobs leave them
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from api import milliseconds, service, wait_ready
from record import row, write_rows
from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from tevatron.core.cli.stack.postgres import EmbeddedPostgres
from tevatron.core.cli.stack.valkey import EmbeddedValkey, free_port
from tevatron.core.store.models import (
    Dataset,
    DatasetKind,
    Evaluation,
    EvaluationValue,
    Job,
    JobEventRow,
    Model,
)
from tevatron.core.store.session import make_engine, make_sessions, migrate

WARM_UP = 5
NUM_STEPS = 5_000
"""Events of the one long training whose page is looked at."""
NUM_QUERIES = 300
METRICS = ("ndcg@10", "recall@100", "map@100")
TRAINING = "job_long"
STARTED = datetime(2026, 11, 1, tzinfo=UTC)
KINDS = ("train", "export", "eval", "eval")
STATES = ("succeeded", "succeeded", "succeeded", "failed", "cancelled", "queued", "waiting")


def fill(session: Session, *, num_jobs: int, num_evaluations: int) -> None:
    """Write rows as a stack leaves them that has worked for some weeks."""
    session.execute(insert(Model), [{"id": "model_base", "name": "base", "path": "models/base"}])
    session.execute(
        insert(Dataset),
        [
            {
                "id": f"ds_{n}",
                "name": f"set-{n}",
                "kind": DatasetKind.BEIR,
                "path": f"datasets/{n}",
                "stats": {},
            }
            for n in range(15)
        ],
    )
    session.execute(insert(Job), [job_row(n) for n in range(num_jobs)])
    session.execute(
        insert(JobEventRow), [event for n in range(num_jobs) for event in history(f"job_{n:06}")]
    )
    session.execute(insert(Job), [job_row(num_jobs) | long_training()])
    session.execute(insert(JobEventRow), steps())
    evals = [n for n in range(num_jobs) if KINDS[n % 4] == "eval"][:num_evaluations]
    session.execute(insert(Evaluation), [evaluation_row(n) for n in evals])
    session.execute(insert(EvaluationValue), [value for n in evals for value in value_rows(n)])
    session.flush()
    session.execute(text("ANALYZE"))


def job_row(n: int) -> dict[str, object]:
    state = STATES[n % len(STATES)]
    kind = KINDS[n % 4]
    began = STARTED + timedelta(seconds=60 * n)
    spec = {"kind": kind, "model": "base", "dataset": "set-1", "arguments": {"learning_rate": 1e-5}}
    return {
        "id": f"job_{n:06}",
        "created_at": began,
        "kind": kind,
        "name": f"run-{n}",
        "state": state,
        "spec": spec,
        "resolved": spec,
        "attempt": 1,
        "last_seq": 6,
        "started_at": began,
        "finished_at": began + timedelta(seconds=50) if state in STATES[:5] else None,
        "reason": "data_error" if state == "failed" else None,
    }


def long_training() -> dict[str, object]:
    return {
        "id": TRAINING,
        "kind": "train",
        "state": "running",
        "phase": "training",
        "last_seq": NUM_STEPS,
        "finished_at": None,
        "reason": None,
    }


def history(job_id: str) -> list[dict[str, object]]:
    common = {"job_id": job_id, "time": STARTED, "attempt": 1, "type": "log"}
    data = {"level": "info", "message": "something that was worth a line"}
    return [{**common, "seq": seq, "data": data} for seq in range(1, 7)]


def steps() -> list[dict[str, object]]:
    common = {"job_id": TRAINING, "time": STARTED, "attempt": 1}
    return [
        {
            **common,
            "seq": seq,
            "type": "metrics",
            "data": {
                "step": seq,
                "loss": 1 / seq,
                "learning_rate": 1e-5,
                "pairs_per_s": 45.8,
                "memory_bytes": 2.0**36,
            },
        }
        if seq % 10
        else {
            **common,
            "seq": seq,
            "type": "progress",
            "data": {"done": seq, "total": 2 * NUM_STEPS, "unit": "steps", "eta_s": 100.0},
        }
        for seq in range(1, NUM_STEPS + 1)
    ]


def evaluation_row(n: int) -> dict[str, object]:
    return {
        "id": f"eval_{n:06}",
        "created_at": STARTED + timedelta(seconds=60 * n),
        "name": f"run-{n}",
        "job_id": f"job_{n:06}",
        "dataset_id": f"ds_{n % 15}",
        "split": "test",
        "first_stage": {"kind": "bm25", "depth": 100, "metrics": dict.fromkeys(METRICS, 0.4)},
        "rerank": {"depth": 100},
        "model_id": "model_base",
        "metrics": dict.fromkeys(METRICS, 0.4 + n % 7 / 100),
        "num_queries": NUM_QUERIES,
        "variant": "as trec_eval",
        "run_sha256": "0" * 64,
        "qrels_sha256": f"{n % 15:064}",
    }


def value_rows(n: int) -> list[dict[str, object]]:
    return [
        {
            "evaluation_id": f"eval_{n:06}",
            "metric": name,
            "query_id": f"q{query}",
            "value": (n * 31 + query * 17) % 101 / 100,
        }
        for name in METRICS
        for query in range(NUM_QUERIES)
    ]


def pages() -> dict[str, str]:
    first, second = (
        f"eval_{n:06}" for n in (2, 62)
    )  # of one data set: 2 and 62 leave the same rest by 15
    return {
        "jobs": "/ui/jobs",
        "jobs, failed evals": "/ui/jobs?kind=eval&state=failed",
        f"one job, {NUM_STEPS} events": f"/ui/jobs/{TRAINING}",
        "checkpoints": "/ui/checkpoints",
        "scorers": "/ui/scorers",
        "evaluations": "/ui/evaluations",
        "one evaluation": f"/ui/evaluations/{first}",
        "two compared": f"/ui/compare?evaluation={first}&baseline={second}",
        "new run": "/ui/new",
        "empty endpoint": "/healthz",
    }


def measure(client: httpx.Client, *, count: int) -> dict[str, list[float]]:
    """Return each page's times, taken turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in pages()}
    for turn in range(WARM_UP + count):
        for name, path in pages().items():
            taken = milliseconds(lambda path=path: client.get(path))
            if turn >= WARM_UP:
                times[name].append(taken)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--serve", action="store_true", help="do not measure; serve until Enter")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tevatron-bench-")))
        postgres = EmbeddedPostgres(folder / "postgres")
        database_url = postgres.start()
        stack.callback(postgres.stop)
        valkey = EmbeddedValkey(folder / "valkey")
        broker_url = valkey.start()
        stack.callback(valkey.stop)
        migrate(database_url)
        engine = make_engine(database_url)
        with make_sessions(engine).begin() as session:
            fill(session, num_jobs=arguments.jobs, num_evaluations=arguments.evaluations)
        engine.dispose()
        port = free_port()
        environment = {
            **os.environ,
            "TEVATRON_HOME": str(folder / "home"),
            "TEVATRON_DATABASE_URL": database_url,
            "TEVATRON_BROKER_URL": broker_url,
            "TEVATRON_API_PORT": str(port),
        }
        stack.enter_context(service("serve", environment, folder / "serve.log"))
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, log=folder / "serve.log")
        if arguments.serve:
            input(f"{url}/ui/jobs; Enter ends it ")
            return
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        started = time.monotonic()
        times = measure(client, count=arguments.count)
        print(f"{time.monotonic() - started:.0f} s, load average {os.getloadavg()[0]:.1f}")
    rows = []
    for name, taken in times.items():
        ordered = sorted(taken)
        median, late = statistics.median(ordered), ordered[int(len(ordered) * 0.95)]
        print(f"{name:25} median {median:7.1f} ms, 95th percentile {late:7.1f} ms")
        rows.append(
            row(
                name=name,
                method="ours" if name != "empty endpoint" else name,
                value=round(median, 1),
                unit="ms, median",
                layout=f"{arguments.jobs} jobs, {arguments.evaluations} evaluations",
                p95_ms=round(late, 1),
                load_average=round(os.getloadavg()[0], 1),
            )
        )
    print(write_rows("pages", rows, packages=("fastapi", "uvicorn", "sqlalchemy", "jinja2")))


if __name__ == "__main__":
    main()
