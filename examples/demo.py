"""The main road in one command: train a reranker, publish it, serve it, rerank BM25's lists, read the metrics back.

    python examples/demo.py                                      SmolLM2-135M on examples/sample
    python examples/demo.py --data FOLDER --queries 30           another BEIR folder, 30 of its queries held out
    python examples/demo.py --model FOLDER                       another base model
    python examples/demo.py --url http://127.0.0.1:8000          an API that runs already

Starts an embedded stack of its own (`tevatron up`), sends one request with four jobs, and stops the stack again. With --url
it uses the API there, with the key in TEVATRON_API_KEY: the data is uploaded, the model's folder must be one that API sees.
What it prints at the end comes out of Postgres through the API.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from smollm2 import smollm2_folder

from tevatron.core.cli.client import Client, read_stack_file
from tevatron.core.cli.follow import all_succeeded, follow_jobs
from tevatron.core.cli.output import print_evaluations, print_jobs
from tevatron.core.cli.specs import dataset_request, model_request
from tevatron.core.cli.submit import register
from tevatron.core.cli.uploading import content_of
from tevatron.core.contracts.jobs import Bm25, EvalJob, From, JobGroup, Rerank, TrainJob
from tevatron.core.contracts.resources import (
    DatasetKind,
    DatasetRequest,
    DatasetState,
    EvaluationResource,
    ModelRequest,
)
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError, ConflictError, TevatronError, UnavailableError
from tevatron.core.process import guarded
from tevatron.core.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(".tevatron/demo")
START_TIMEOUT_S = 180.0
METRICS = ["ndcg@10", "recall@10"]
PROMPT_TEMPLATE = "tevatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What fits into some minutes of two cores with a model of 135 million parameters."""

    rerank_depth: int = 10
    """Candidates a query; a model of this size, trained for minutes, loses among more."""
    max_length: int = 160
    group_size: int = 4
    epochs: float = 2.5
    learning_rate: float = 2e-4
    """The best of 5e-5, 1e-4 and 2e-4 in the median of 3 seeds, with 4 to 6 passages a group and 2 to 4 epochs."""
    queries_per_step: int = 4
    max_steps: int = 40
    """Bounds the time on larger data."""
    seed: int = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a run works on."""

    training: Path
    heldout: Path
    model: str
    """Folder, or hub id."""


def main() -> int:
    """Run the command."""
    options = _parser().parse_args()
    started = time.monotonic()
    try:
        with open_home(options.home) as home:
            work = prepare(home, options.data, queries=options.queries, model=options.model)
            recipe = Recipe(seed=options.seed)
            if options.url is None:
                with running_stack(home, roots=[home, Path(work.model)]) as client:
                    evaluations = run_jobs(client, register_input(client, work), recipe)
            else:
                with connect(options.url) as client:
                    evaluations = run_jobs(client, upload_input(client, work), recipe)
    except TevatronError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    names = {entry.dataset_id: options.data.name for entry in evaluations}
    print()
    print_evaluations(evaluations, names=names, metrics=METRICS)
    place = options.url or f"the stack's files are in {home}"
    print(f"\n{time.monotonic() - started:.0f} s in all; {place}")
    if options.json is not None:
        values = {entry.name: entry.metrics for entry in evaluations}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train, serve and evaluate a small reranker on this machine."
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "examples" / "sample", help="BEIR folder"
    )
    parser.add_argument(
        "--queries", type=int, help="test queries that are held out; all if left out"
    )
    parser.add_argument(
        "--model", help="Hugging Face folder, or a hub id; SmolLM2-135M if left out"
    )
    parser.add_argument("--url", help="of an API that runs already, in place of a stack of our own")
    parser.add_argument(
        "--home",
        type=Path,
        help="folder of the stack, kept; .tevatron/demo, made anew, if left out",
    )
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    parser.add_argument("--json", type=Path, help="write the metrics into this file too")
    return parser


@contextmanager
def open_home(given: Path | None) -> Iterator[Path]:
    """Give the stack's folder; our own one starts empty, as each run leaves a gigabyte of training states."""
    home = (given or HOME).absolute()
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                f"another demo runs in {home}; wait for it, or give --home"
            ) from None
        if given is None and home.exists():
            shutil.rmtree(home)
        home.mkdir(exist_ok=True)
        yield home


def prepare(
    home: Path, data: Path, *, queries: int | None = None, model: str | None = None
) -> Input:
    """Make training rows and the held-out collection, and have the model at hand."""
    _say("preparing the training data: BM25 negatives for the training queries")
    output = home / "input" / _digest(f"{data.absolute()} {queries}")
    command = [sys.executable, "-m", "tevatron.utils.prepare_training_data"]
    command += ["--dataset", str(data), "--output_dir", str(output)]
    command += ["--queries", str(queries)] if queries is not None else []
    if subprocess.run(command, check=False).returncode != 0:
        raise ConfigError(f"no training data could be made of {data}")
    model = model or str(smollm2_folder())
    if Path(model).is_dir():
        model = str(Path(model).absolute())
    return Input(training=output / "train.jsonl", heldout=output / "heldout", model=model)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextmanager
def running_stack(home: Path, *, roots: list[Path]) -> Iterator[Client]:
    """Run `tevatron up` as a child of ours for the length of the block; its log goes to up.log in the home."""
    _say(f"starting the stack; its log: {home / 'up.log'}")
    folders = [root for root in roots if root.is_dir()]
    command = [sys.executable, "-P", "-m", "tevatron.core.cli.main", "up", "--home", str(home)]
    command += [part for folder in folders for part in ("--root", str(folder))]
    command += [] if len(folders) == len(roots) else ["--allow-hub"]
    with (home / "up.log").open("w") as log:
        # Its own session, so that Ctrl-C reaches us alone and we stop it in order; it dies with us in any case.
        stack = subprocess.Popen(guarded(command), stdout=log, stderr=log, start_new_session=True)
    try:
        with Client(_wait_ready(stack, home)) as client:
            yield client
    finally:
        _say("stopping the stack")
        stack.send_signal(signal.SIGTERM)
        stack.wait()


def _wait_ready(stack: subprocess.Popen[bytes], home: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and stack.poll() is None:
        found = read_stack_file(home)
        if found is not None and found["pid"] == stack.pid:
            return str(found["url"])
        time.sleep(0.1)
    last = "\n".join((home / "up.log").read_text(errors="replace").splitlines()[-15:])
    raise UnavailableError(f"the stack did not come up; the end of its log:\n{last}")


class Names(NamedTuple):
    """Under which names the input is registered, and how many rows train."""

    model: str
    training: str
    heldout: str
    num_rows: int


def run_jobs(client: Client, names: Names, recipe: Recipe) -> list[EvaluationResource]:
    """Send the jobs in one request and follow them; returns the evaluations, newest first."""
    _say("one request, four jobs: BM25, the untrained model, training, the trained model")
    return follow(client, demo_jobs(names, recipe))


def connect(url: str) -> Client:
    """Return a client of an API that runs already."""
    key = Settings.from_environment().api_key
    return Client(url, api_key=None if key is None else key.get_secret_value())


def register_input(client: Client, work: Input) -> Names:
    """Make model and data known to the API by their paths, unless they are."""
    tag = _digest(f"{work.training} {work.model}")
    model = _model_request(work.model, tag, is_folder=Path(work.model).is_dir())
    training = dataset_request(f"demo-train-{tag}", path=work.training, kind="training")
    heldout = dataset_request(f"demo-test-{tag}", path=work.heldout, kind="beir")
    register(client, models=[model], datasets=[training, heldout])
    return Names(model.name, training.name, heldout.name, _num_rows(work.training))


def upload_input(client: Client, work: Input) -> Names:
    """Make model and data known to an API that sees the model's folder, but not our files; unless they are."""
    tag = _digest(f"{work.training.read_text(encoding='utf-8')} {work.model}")
    model = _model_request(work.model, tag, is_folder=Path(work.model).is_absolute())
    register(client, models=[model], datasets=[])
    names = Names(model.name, f"demo-train-{tag}", f"demo-test-{tag}", _num_rows(work.training))
    for name, kind, path in (
        (names.training, DatasetKind.TRAINING, work.training),
        (names.heldout, DatasetKind.BEIR, work.heldout),
    ):
        known = client.find_dataset(name)
        if known is None or known.state is not DatasetState.READY:
            with content_of(path, kind) as content:
                client.upload_dataset(DatasetRequest(name=name, kind=kind), content)
    return names


def _model_request(model: str, tag: str, *, is_folder: bool) -> ModelRequest:
    return model_request(
        re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(model).name}-{tag}").strip("-."),
        path=Path(model) if is_folder else None,
        hub_id=None if is_folder else model,
        revision=None if is_folder else "main",
    )


def _num_rows(training: Path) -> int:
    with training.open(encoding="utf-8") as rows:
        return sum(1 for _ in rows)


def follow(client: Client, jobs: JobGroup) -> list[EvaluationResource]:
    """Submit the jobs and follow them to their end; returns their evaluations, newest first, as the API lists them."""
    ended = follow_jobs(client, client.submit(jobs))
    if not all_succeeded(ended):
        print_jobs(ended)
        raise UnavailableError("not every job succeeded")
    by_job = {entry.job_id: entry for entry in client.evaluations()}
    return [by_job[job.id] for job in reversed(ended) if job.id in by_job]


def demo_jobs(names: Names, recipe: Recipe) -> JobGroup:
    """Return the four jobs."""
    arguments = TrainArguments(
        prompt_template=PROMPT_TEMPLATE,
        rerank_max_len=recipe.max_length,
        train_group_size=recipe.group_size,
        per_device_train_batch_size=recipe.queries_per_step,
        max_steps=min(
            recipe.max_steps, round(recipe.epochs * names.num_rows / recipe.queries_per_step)
        ),
        learning_rate=recipe.learning_rate,
        warmup_ratio=0.1,
        logging_steps=1,
        seed=recipe.seed,
    )
    first = Bm25(depth=100)
    untrained = Rerank(
        model=names.model,
        prompt_template=PROMPT_TEMPLATE,
        max_length=recipe.max_length,
        depth=recipe.rerank_depth,
    )
    trained = Rerank(checkpoint=From(source="train"), depth=recipe.rerank_depth)
    return JobGroup(
        jobs={
            "bm25": EvalJob(name="BM25", dataset=names.heldout, first_stage=first),
            "untrained": EvalJob(
                name="untrained", dataset=names.heldout, first_stage=first, rerank=untrained
            ),
            "train": TrainJob(
                name="train", model=names.model, dataset=names.training, arguments=arguments
            ),
            "trained": EvalJob(
                name="trained", dataset=names.heldout, first_stage=first, rerank=trained
            ),
        }
    )


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
