"""How long a submission takes: POST /v1/jobs beside GET /healthz, which does nothing, turn by turn in one run.

python benchmarks/api.py                    its own Postgres (fsync on), Valkey, API and dispatcher; no workers
python benchmarks/api.py --url URL --model NAME --dataset NAME    a running stack; its jobs are cancelled at the end
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from record import row, write_rows

from tevatron.core.cli.stack.postgres import EmbeddedPostgres
from tevatron.core.cli.stack.valkey import EmbeddedValkey, free_port
from tevatron.core.process import guarded
from tevatron.core.store.session import migrate

WARM_UP = 30
START_TIMEOUT_S = 120.0


@contextmanager
def own_stack(folder: Path) -> Iterator[str]:
    """Run the parts that a submission meets; yields the API's URL."""
    with ExitStack() as stack:
        postgres = EmbeddedPostgres(folder / "postgres")
        database_url = postgres.start()
        stack.callback(postgres.stop)
        valkey = EmbeddedValkey(folder / "valkey")
        broker_url = valkey.start()
        stack.callback(valkey.stop)
        migrate(database_url)
        port = free_port()
        environment = {
            **os.environ,
            "TEVATRON_HOME": str(folder / "home"),
            "TEVATRON_DATABASE_URL": database_url,
            "TEVATRON_BROKER_URL": broker_url,
            "TEVATRON_API_PORT": str(port),
            "TEVATRON_DATASET_ROOTS": str(folder),
            "TEVATRON_MODEL_ROOTS": str(folder),
        }
        for command in ("serve", "dispatcher"):
            stack.enter_context(service(command, environment, folder / f"{command}.log"))
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, log=folder / "serve.log")
        yield url


@contextmanager
def service(command: str, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run one process of the API service."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            guarded([sys.executable, "-m", "tevatron.api.main", command]),
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def wait_ready(url: str, *, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not there yet
        time.sleep(0.2)
    raise SystemExit(
        f"the API is not ready after {START_TIMEOUT_S:g} s:\n{log.read_text()[-2000:]}"
    )


def register(client: httpx.Client, folder: Path) -> None:
    """Register a model folder and a training file that are only looked at."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"query": "q", "positive_passages": [{"text": "p"}]}) + "\n")
    for path, body in (
        ("/v1/models", {"name": "model", "path": str(model)}),
        ("/v1/datasets", {"name": "rows", "kind": "training", "path": str(rows)}),
    ):
        client.post(path, json=body).raise_for_status()


def milliseconds(call: Callable[[], httpx.Response]) -> float:
    started = time.perf_counter()
    answer = call()
    taken = (time.perf_counter() - started) * 1000
    answer.raise_for_status()
    return taken


def measure(
    client: httpx.Client, *, model: str, dataset: str, count: int
) -> dict[str, list[float]]:
    """Return the times of both requests, taken turn by turn; cancels the jobs afterwards."""
    submitted: list[str] = []

    def submit() -> httpx.Response:
        body = {"kind": "train", "model": model, "dataset": dataset}
        headers = {"Idempotency-Key": f"benchmark-{time.time_ns()}"}
        answer = client.post("/v1/jobs", json=body, headers=headers)
        submitted.extend(job["id"] for job in answer.json().get("jobs", []))
        return answer

    times: dict[str, list[float]] = {"submit": [], "empty": []}
    try:
        for turn in range(WARM_UP + count):
            taken = {
                "submit": milliseconds(submit),
                "empty": milliseconds(lambda: client.get("/healthz")),
            }
            if turn >= WARM_UP:
                for name, value in taken.items():
                    times[name].append(value)
    finally:
        for job_id in submitted:
            client.post(f"/v1/jobs/{job_id}:cancel")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--model", default="model")
    parser.add_argument("--dataset", default="rows")
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tevatron-bench-")))
        url = arguments.url or stack.enter_context(own_stack(folder))
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
        if arguments.url is None:
            register(client, folder)
        times = measure(
            client, model=arguments.model, dataset=arguments.dataset, count=arguments.count
        )
    rows = []
    for method, name in (("ours", "submit"), ("empty endpoint", "empty")):
        ordered = sorted(times[name])
        for layout, value in (
            ("median", statistics.median(ordered)),
            ("95th percentile", ordered[int(len(ordered) * 0.95)]),
        ):
            rows.append(
                row(
                    name="submit a job",
                    method=method,
                    layout=layout,
                    value=round(value, 2),
                    unit="ms",
                )
            )
            print(f"{method:15} {layout:16} {value:8.2f} ms")
    print(
        f"load average {os.getloadavg()[0]:.1f}; {write_rows('api', rows, packages=('fastapi', 'uvicorn', 'sqlalchemy'))}"
    )


if __name__ == "__main__":
    main()
