"""BEIR-15 score-only: 26 synthetic runs of the real queries (47,000 x 100 documents), ours beside the beir package's evaluate.

`reference` reads the same files line by line, as the reference does, and calls beir's `EvaluateRetrieval.evaluate` and its
MRR, one data set after the other; `ours` is `python -m tevatron.eval.run` as a user starts it. Times are wall clock from start to
exit of a process, its imports included; the best of so many rounds, taken in turn. Values must agree to beir's 5 digits.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import row, write_rows

BEIR = "beir==2.2.0"
DEPTH = 100
K_VALUES = (10, 100, 200, 1000)
GOAL = 3.0
MOST_BYTES = 2 * 10**9
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
REFERENCE = """
import gzip, json, sys
from beir.retrieval.evaluation import EvaluateRetrieval

def read_qrels(path):
    qrels = {}
    with gzip.open(path, "rt") as file:
        for line in file:
            query_id, _, docid, grade = line.split()
            qrels.setdefault(query_id, {})[docid] = int(grade)
    return qrels

def read_ranklist(path):
    run = {}
    with open(path) as file:
        for line in file:
            query_id, docid, score = line.split()
            run.setdefault(query_id, {})[docid] = float(score)
    return run

qrels_dir, runs, output, ks = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
found = {}
for name in json.loads(sys.argv[5]):
    qrels = read_qrels(f"{qrels_dir}/qrels.{name}.txt.gz")
    run = read_ranklist(f"{runs}/{name}/rank.text")
    ndcg, map_, recall, precision = EvaluateRetrieval.evaluate(
        qrels, run, ks, ignore_identical_ids=name in ("arguana", "quora")
    )
    mrr = EvaluateRetrieval.evaluate_custom(qrels, run, ks, "mrr")
    found[name] = {"ndcg": ndcg, "map": map_, "recall": recall, "precision": precision, "mrr": mrr}
json.dump(found, open(output, "w"))
"""


def main() -> None:
    """Measure and write benchmarks/results/eval_sweep.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with beir15/qrels.*")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    qrels_dir = arguments.data / "beir15"
    names = [
        path.name.removeprefix("qrels.").removesuffix(".txt.gz")
        for path in sorted(qrels_dir.glob("qrels.*.txt.gz"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        num_queries = sum(_write_run(qrels_dir, work / "runs", name) for name in names)
        print(f"{len(names)} runs, {num_queries} queries x {DEPTH} documents")
        _install_beir(work / "beir")
        theirs, ours = [], []
        for round_number in range(arguments.rounds):
            theirs.append(_time(_reference(qrels_dir, work, names), work / "beir"))
            ours.append(_time(_sweep(qrels_dir, work, round_number), None))
            print(f"beir {theirs[-1][0]:.1f} s, ours {ours[-1][0]:.1f} s")
        difference = _largest_difference(work, names)
    seconds = [min(times[0] for times in method) for method in (theirs, ours)]
    peaks = [max(times[1] for times in method) for method in (theirs, ours)]
    layout = f"{len(names)} runs, {num_queries} queries x {DEPTH}"
    rows = [
        row(name=name, method=method, value=round(value, 2), unit=unit, layout=layout)
        for place, method in enumerate(("reference", "ours"))
        for name, value, unit in (
            ("score-only sweep", seconds[place], "s"),
            ("peak memory of the sweep", peaks[place] / 1e9, "GB"),
        )
    ]
    ratio = seconds[0] / seconds[1]
    rows.append(
        row(
            name="score-only sweep",
            method="ours",
            value=round(ratio, 2),
            unit="x as fast",
            layout=layout,
            note=f"largest difference of a value {difference:.1e}, beir rounds to 5 digits",
        )
    )
    print(
        f"{ratio:.2f} times as fast; peak {peaks[1] / 1e9:.2f} GB; largest difference {difference:.1e}"
    )
    print(write_rows("eval_sweep", rows, packages=("pytrec-eval-terrier", "numpy")))
    if ratio < 1 or peaks[1] > MOST_BYTES or difference > 1e-5:
        sys.exit(
            f"expected at least as fast (goal {GOAL:g} times), under 2 GB, and the same values"
        )


def _write_run(qrels_dir: Path, runs: Path, name: str) -> int:
    """Write a run with most of the relevant documents somewhere in it; return its number of queries."""
    qrels: dict[str, list[str]] = {}
    with gzip.open(qrels_dir / f"qrels.{name}.txt.gz", "rt") as file:
        for line in file:
            query_id, _, docid, grade = line.split()
            documents = qrels.setdefault(query_id, [])
            if int(grade) > 0:
                documents.append(docid)
    draw = random.Random(name)
    (runs / name).mkdir(parents=True)
    with (runs / name / "rank.text").open("w") as file:
        for query_id, relevant in qrels.items():
            found = [docid for docid in relevant if draw.random() < 0.8][: DEPTH // 2]
            others = draw.sample(range(10**7), DEPTH - len(found))
            documents = found + [f"{number}x" for number in others]
            draw.shuffle(documents)
            scores = sorted((draw.gauss(0, 5) for _ in documents), reverse=True)
            file.writelines(
                f"{query_id}\t{docid}\t{score}\n"
                for docid, score in zip(documents, scores, strict=True)
            )
    return len(qrels)


def _install_beir(folder: Path) -> None:
    # Its evaluation needs pytrec_eval alone, which is here.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(folder),
        BEIR,
    ]
    subprocess.run(command, check=True)


def _reference(qrels_dir: Path, work: Path, names: list[str]) -> list[str]:
    words = [str(qrels_dir), str(work / "runs"), str(work / "beir.json"), json.dumps(K_VALUES)]
    return [sys.executable, "-c", REFERENCE, *words, json.dumps(names)]


def _sweep(qrels_dir: Path, work: Path, number: int) -> list[str]:
    return [
        *(sys.executable, "-m", "tevatron.eval.run", "--benchmark", "beir15"),
        *("--ranklist_pattern", str(work / "runs" / "{dataset}" / "rank.text")),
        *("--beir_cache_dir", str(qrels_dir), "--k_values", *map(str, K_VALUES)),
        *("--results_dir", str(work / f"out{number}")),
    ]


def _time(command: list[str], path: Path | None) -> tuple[float, int]:
    """Return seconds, and the peak of the memory of all its processes in bytes (PSS, looked at every tenth of a second)."""
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - started
        assert process.stderr is not None
        if process.returncode:
            sys.exit(f"{command[:4]} failed: {process.stderr.read().decode()[-2000:]}")
    return seconds, peak


def _memory(pid: int) -> int:
    total = 0
    for child in (pid, *_children(pid)):
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in text.split()]


def _largest_difference(work: Path, names: list[str]) -> float:
    theirs = json.loads((work / "beir.json").read_text())
    largest = 0.0
    for name in names:
        ours = json.loads((work / "out0" / f"{name}.metrics.json").read_text())
        for block, values in theirs[name].items():
            for label, value in values.items():
                largest = max(largest, abs(value - ours[block][label]))
    return largest


if __name__ == "__main__":
    main()
