"""Does a real model learn, and the same with both backends? nDCG@10 of held-out SciFact queries, BM25's candidates reranked.

SmolLM2-135M is trained by the hf and the megatron backend, on the same rows with the same seeds, steps and learning rates,
fully and with LoRA, three seeds each; then the twelve checkpoints and the untrained model rank the same candidates:

    python benchmarks/learning.py --prepare FOLDER --dataset scifact           a BEIR folder; needs no GPU
    python benchmarks/learning.py --run FOLDER --model DIR --output DIR        GPUs: all trainings at the same time
    python benchmarks/learning.py --score FOLDER --runs OUTPUT/learning.tar.gz  writes the results; needs no GPU

A run that fails is named and reported, and takes no other with it. `docs/megatron.md` says what the megatron runs need;
`--megatron_python` and `--megatron_path` give it to them alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from record import row, surroundings, write_rows

from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import Run, read_ranklist, write_ranklist
from tevatron.core.formats.rerank import RerankRow, read_rerank

SEEDS = (1, 2, 3)
BACKENDS = ("hf", "megatron")
KINDS = ("full", "LoRA")
MODEL = "SmolLM2-135M-Instruct"
NUM_HELDOUT = 100
DEPTH = 20
"""Candidates a query."""
MAX_LENGTH = 384
RECIPE: dict[str, object] = {
    "prompt_template": "tevatron",
    "rerank_max_len": MAX_LENGTH,
    "train_group_size": 8,
    "per_device_train_batch_size": 4,
    # Three passes over the 200 queries.
    "max_steps": 150,
    "warmup_ratio": 0.1,
    "dtype": "bfloat16",
    # A step in one pass.
    "packing_max_tokens": 4 * 8 * MAX_LENGTH,
    "logging_steps": 10,
    "save_steps": 10_000,
}
RATES = {"full": 2e-4, "LoRA": 1e-3}
LORA: dict[str, object] = {"use_lora": True, "lora_r": 16, "lora_alpha": 32}
DRIVERS = {"hf": "tevatron.reranker.driver.train", "megatron": "tevatron.megatron.driver.train"}
METRIC = "ndcg@10"
GOAL, LARGEST_DIFFERENCE = 0.55, 0.03

TRAINING, CANDIDATES, QRELS = "train.jsonl.gz", "rerank.jsonl.gz", "qrels.tsv"
ARCHIVE, FACTS, LOG = "learning.tar.gz", "facts.json", "log.txt"
UNTRAINED = "untrained"
LOG_LINES = 40
PACKAGES = (
    *("torch", "transformers", "accelerate", "peft"),
    *("megatron-core", "megatron-bridge", "transformer-engine"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One of the trainings."""

    backend: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.kind}-{self.seed}"

    def flags(self, *, model: Path, data: Path, output: Path, max_steps: int) -> list[str]:
        """Return the command line of the driver; the same for both backends."""
        values = {
            "model_name_or_path": model,
            "base_model": MODEL,
            "dataset_path": data / TRAINING,
            "output_dir": output,
            "seed": self.seed,
            "learning_rate": RATES[self.kind],
            **RECIPE,
            **(LORA if self.kind == "LoRA" else {}),
            "max_steps": max_steps,
        }
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


TRAININGS = [
    Training(backend=backend, kind=kind, seed=seed)
    for backend, kind, seed in product(BACKENDS, KINDS, SEEDS)
]


def main() -> int:
    """Do one of the steps."""
    args = _parser().parse_args()
    if args.prepare:
        prepare(args.prepare, args.dataset)
    elif args.run:
        return Conductor(args).run()
    elif args.rank:
        rank(args.rank, candidates=args.candidates, output=args.output, plain=args.plain)
    else:
        score(args.score, args.runs or args.score / ARCHIVE)
    return 0


def prepare(folder: Path, dataset: Path) -> None:
    """Write training rows, candidates and judgments, small enough to be carried to another machine."""
    # BM25 and trec_eval, which the machine with the GPUs need not have.
    from tevatron.evaluator.bm25 import open_index, search_all
    from tevatron.evaluator.prepare import TRAINING_NAME, PrepareOptions
    from tevatron.evaluator.prepare import prepare as prepare_training

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tevatron-learning-") as name:
        work = Path(name)
        made = prepare_training(BeirFolder(dataset), work, PrepareOptions(num_queries=NUM_HELDOUT))
        _compress(work / TRAINING_NAME, folder / TRAINING)
        heldout = BeirFolder(work / "heldout")
        queries, documents = heldout.queries(), {one.docid: one for one in heldout.corpus()}
        found = search_all(open_index(heldout), queries, depth=DEPTH)
        rows = [
            RerankRow(query_id, queries[query_id], docid, *documents[docid][1:], score)
            for query_id, scores in found.items()
            for docid, score in scores.items()
        ]
        _write_candidates(folder / CANDIDATES, rows)
        shutil.copyfile(work / "heldout" / "qrels" / "test.tsv", folder / QRELS)
    print(
        f"{folder}: {made.num_rows} training rows, {len(rows)} candidates of {len(found)} queries"
    )


def _compress(path: Path, target: Path) -> None:
    with path.open("rb") as source, gzip.open(target, "wb") as file:
        shutil.copyfileobj(source, file)


def _write_candidates(path: Path, rows: Iterable[RerankRow]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(one._asdict(), ensure_ascii=False) + "\n" for one in rows)


def rank(model: Path, *, candidates: Path, output: Path, plain: bool) -> None:
    """Rank the candidates with a checkpoint as the scorer loads it; `plain` is a model that has no contract."""
    # torch, which only this step needs.
    from tevatron.core.prompts import Pair
    from tevatron.scorer.loading import load
    from tevatron.scorer.served import ServeOptions

    template = str(RECIPE["prompt_template"]) if plain else None
    served = load(
        ServeOptions(
            backend="hf",
            model=model,
            prompt_template=template,
            max_length=MAX_LENGTH if plain else None,
        )
    )
    rows = list(read_rerank(candidates))
    pairs = [Pair(query=one.query, title=one.title, text=one.text) for one in rows]
    scores = served.engine.score([one.ids for one in served.renderer.render_all(pairs)])
    run: Run = {}
    for one, value in zip(rows, scores, strict=True):
        run.setdefault(one.query_id, {})[one.docid] = value
    write_ranklist(output, run)


class Conductor:
    """Trains and ranks everything at the same time, each training on one GPU, and keeps what is done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._data: Path = args.run.absolute()
        self._work: Path = args.work.absolute()
        self._runs = self._work / "runs"
        self._begin = time.monotonic()
        self._deadline = self._begin + args.deadline_s
        self._gpus = _gpus()
        # Where the versions of Megatron are found.
        sys.path += [args.megatron_path] if args.megatron_path else []
        self._facts: dict[str, dict[str, object]] = {}
        self._lock = threading.Lock()

    def run(self) -> int:
        """Return how many of the runs failed."""
        args = self._args
        args.output.mkdir(parents=True, exist_ok=True)
        self._runs.mkdir(parents=True, exist_ok=True)
        wanted = [one for one in TRAININGS if not args.only or one.name in args.only]
        self._say(f"{len(wanted)} trainings on {', '.join(self._gpus) or 'the CPU'}")
        with ThreadPoolExecutor(max_workers=args.at_once or len(wanted) + 1) as pool:
            ends = [pool.submit(self._guarded, UNTRAINED, self._rank, UNTRAINED, args.model, 0)]
            for place, one in enumerate(wanted):
                ends.append(pool.submit(self._guarded, one.name, self._train_and_rank, one, place))
        for end in ends:
            end.result()
        self._keep()
        failed = [name for name, facts in self._facts.items() if "error" in facts]
        self._say(f"done; failed: {', '.join(failed) or 'none'}")
        return len(failed)

    def _guarded(self, name: str, step: Callable[..., None], *given: object) -> None:
        """Run one of the threads; what goes wrong in it is written down, and the others go on."""
        try:
            step(*given)
        except Exception as error:  # noqa: BLE001  a thread's end: its error is the run's result
            self._put(name, "error", f"{type(error).__name__}: {error}")
            self._say(f"{name}: FAILED: {error}\n{self._log_tail(name)}")
        self._keep()

    def _train_and_rank(self, training: Training, place: int) -> None:
        folder = self._work / training.name
        flags = training.flags(
            model=self._args.model.absolute(),
            data=self._data,
            output=folder,
            max_steps=self._args.max_steps,
        )
        environment = self._environment(place)
        python = sys.executable
        if training.backend == "megatron":
            python = self._args.megatron_python or python
            environment |= _one_rank(port=29600 + place)
            own = [self._args.megatron_path] if self._args.megatron_path else []
            environment["PYTHONPATH"] = os.pathsep.join([*own, environment.get("PYTHONPATH", "")])
        seconds = self._call(
            training.name, [python, "-m", DRIVERS[training.backend], *flags], environment
        )
        self._note(training.name, "train_s", seconds)
        self._put(training.name, "events", _metrics(folder / "events.jsonl"))
        # Gigabytes, which nobody goes on from.
        shutil.rmtree(folder / "states", ignore_errors=True)
        self._rank(training.name, folder / "export", place)

    def _rank(self, name: str, model: Path, place: int) -> None:
        command = [sys.executable, __file__, "--rank", str(model.absolute())]
        command += ["--candidates", str(self._data / CANDIDATES)]
        command += ["--output", str(self._runs / f"{name}.txt")]
        command += ["--plain"] if name == UNTRAINED else []
        self._note(name, "rank_s", self._call(name, command, self._environment(place)))

    def _environment(self, place: int) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if self._gpus:
            own["CUDA_VISIBLE_DEVICES"] = str(place % len(self._gpus))
            own["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            # Compiling Megatron's few fused operations would take as long as this training.
            own["TORCH_COMPILE_DISABLE"] = own["TORCHDYNAMO_DISABLE"] = "1"
        return {**os.environ, **own}

    def _call(self, name: str, command: list[str], environment: Mapping[str, str]) -> float:
        """Run a command with its output in the run's log; returns its seconds."""
        begin = time.monotonic()
        with (self._work / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                status = child.wait(timeout=max(0.0, self._deadline - begin))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise TimeoutError(
                    f"not done within --deadline_s {self._args.deadline_s}"
                ) from None
        if status != 0:
            raise RuntimeError(f"{' '.join(command[1:4])} ended with status {status}")
        return time.monotonic() - begin

    def _note(self, name: str, what: str, seconds: float) -> None:
        self._put(name, what, round(seconds, 1))
        self._say(f"{name}: {what} {seconds:.1f}")

    def _put(self, name: str, what: str, value: object) -> None:
        with self._lock:
            self._facts.setdefault(name, {})[what] = value

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:5.1f} s] {text}", flush=True)

    def _log_tail(self, name: str) -> str:
        path = self._work / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-LOG_LINES:])

    def _keep(self) -> None:
        """Write what there is so far into one small file: whoever is stopped later has it."""
        with self._lock:
            facts = {
                **surroundings(PACKAGES, gpus=" + ".join(self._gpus) or "none"),
                "command": "python benchmarks/learning.py --run FOLDER --model SMOLLM2 --output FOLDER",
                "max_steps": self._args.max_steps,
                "runs": self._facts,
            }
            (self._work / FACTS).write_text(json.dumps(facts, indent=1))
            logs = (f"== {name}\n{self._log_tail(name)}\n" for name in self._facts)
            (self._work / LOG).write_text("\n".join(logs))
            beside = self._args.output / f"{ARCHIVE}.tmp"
            with tarfile.open(beside, "w:gz") as archive:
                for path in (self._work / FACTS, self._work / LOG, *sorted(self._runs.iterdir())):
                    archive.add(path, path.name)
            beside.rename(self._args.output / ARCHIVE)


def _one_rank(*, port: int) -> dict[str, str]:
    """Return what torchrun tells the one rank of a run, without a second process that imports torch."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def _metrics(path: Path) -> list[object]:
    """Return the numbers of a run's events: loss, rate, speed, memory."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["data"] for event in events if event["type"] == "metrics"]


def score(folder: Path, archive: Path) -> None:
    """Compute the metric of every run and write benchmarks/results/learning.json."""
    runs, facts = _read_archive(archive)
    runs["BM25"] = {}
    for one in read_rerank(folder / CANDIDATES):
        assert one.score is not None, "--prepare writes BM25's scores"
        runs["BM25"].setdefault(one.query_id, {})[one.docid] = one.score
    qrels = read_qrels(folder / QRELS)
    runs["ideal"] = {
        qid: {docid: float(qrels[qid].get(docid, 0)) for docid in scores}
        for qid, scores in runs["BM25"].items()
    }
    values = {name: mean_of(qrels, run) for name, run in runs.items()}
    for name, value in sorted(values.items()):
        print(f"{name:20} {value:.4f}")
    made = rows_of(values, facts)
    keys = ("gpus", "machine", "versions", "date", "command")
    path = write_rows("learning", made, measured={key: facts[key] for key in keys})
    for one in made:
        print(f"{one['method']:10} {one['layout']:30} {one['value']:.4f}  {one['note']}")
    print(path)


def mean_of(qrels: Mapping[str, Mapping[str, int]], run: Run) -> float:
    """Return the mean over the judged queries."""
    from tevatron.evaluator.metrics import evaluate, parse_metric  # trec_eval, as in prepare

    return evaluate(qrels, run, [parse_metric(METRIC)]).means[METRIC]


def rows_of(values: Mapping[str, float], facts: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the table: BM25, the untrained model, and each backend's mean over the seeds."""
    top = f"BM25 top {DEPTH}"
    rows = [
        _row(
            "BM25", top, values["BM25"], f"no order of them reaches more than {values['ideal']:.3f}"
        )
    ]
    if UNTRAINED in values:
        rows.append(_row(UNTRAINED, top, values[UNTRAINED], ""))
    means: dict[tuple[str, str], float] = {}
    steps = facts["max_steps"]
    for kind, backend in product(KINDS, BACKENDS):
        names = [one.name for one in TRAININGS if (one.backend, one.kind) == (backend, kind)]
        found = [values[name] for name in names if name in values]
        if not found:
            continue
        means[kind, backend] = statistics.fmean(found)
        seeds = ", ".join(f"{value:.3f}" for value in found)
        notes = [f"seeds {seeds}" + ("" if len(found) == len(names) else f" of {len(names)}")]
        notes.append(f"goal {GOAL}: {'met' if means[kind, backend] > GOAL else 'missed'}")
        if backend != "hf" and (kind, "hf") in means:
            difference = means[kind, backend] - means[kind, "hf"]
            verdict = "met" if abs(difference) <= LARGEST_DIFFERENCE else "missed"
            notes.append(f"{difference:+.3f} to hf, goal {LARGEST_DIFFERENCE}: {verdict}")
        layout = f"{kind}, {steps} steps, lr {RATES[kind]:g}"
        rows.append(_row(f"ours, {backend}", layout, means[kind, backend], "; ".join(notes)))
    return rows


def _row(method: str, layout: str, value: float, note: str) -> dict[str, object]:
    name = f"nDCG@10 of {NUM_HELDOUT} held-out SciFact queries"
    return row(
        name=name, model=MODEL, layout=layout, method=method, value=value, unit="", note=note
    )


def _read_archive(path: Path) -> tuple[dict[str, Run], dict[str, object]]:
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as name, tarfile.open(path) as archive:
        archive.extractall(name, filter="data")
        for found in sorted(Path(name).glob("*.txt")):
            if found.name != LOG:
                runs[found.stem] = read_ranklist(found)
        facts: dict[str, object] = json.loads((Path(name) / FACTS).read_text())
    return runs, facts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Real learning, the same with both backends.")
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--prepare", type=Path, metavar="FOLDER")
    step.add_argument("--run", type=Path, metavar="FOLDER", help="train and rank")
    step.add_argument("--rank", type=Path, metavar="MODEL", help="rank with one; used by --run")
    step.add_argument("--score", type=Path, metavar="FOLDER")
    parser.add_argument("--dataset", type=Path, help="--prepare: BEIR folder")
    parser.add_argument("--model", type=Path, help="--run: SmolLM2-135M as Hugging Face folder")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/tevatron-learning"), help="--run: gigabytes go here"
    )
    parser.add_argument("--output", type=Path, help=f"--run: gets {ARCHIVE}")
    parser.add_argument("--only", nargs="*", help="--run: names such as hf-full-1; all if left out")
    parser.add_argument(
        "--at_once", type=int, help="--run: trainings at the same time; all if left out"
    )
    parser.add_argument("--max_steps", type=int, default=RECIPE["max_steps"])
    parser.add_argument("--deadline_s", type=float, default=540.0, help="--run: ends by then")
    parser.add_argument("--megatron_python", help="--run: interpreter of the megatron runs")
    parser.add_argument("--megatron_path", help="--run: goes before their PYTHONPATH")
    parser.add_argument("--candidates", type=Path, help="--rank")
    parser.add_argument("--plain", action="store_true", help="--rank: the model has no contract")
    parser.add_argument("--runs", type=Path, help=f"--score: FOLDER/{ARCHIVE} if left out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
