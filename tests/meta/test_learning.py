"""The benchmark of learning: both backends are told the same, and its table is what the runs give."""

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from tevatron.trainer.program.flags import parse

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def learning():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("learning", BENCHMARKS / "learning.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["learning"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("learning", None)


def parsed(learning, backend, kind):
    training = learning.Training(backend=backend, kind=kind, seed=2)
    paths = {"model": Path("m"), "data": Path("d"), "output": Path("o")}
    found = parse(training.flags(**paths, max_steps=7), backend=backend)
    assert found.warnings == []
    assert found.run.hf_arguments == {}
    return found.run


@pytest.mark.parametrize("kind", ["full", "LoRA"])
def test_both_backends_are_told_the_same(learning, kind):
    hf, megatron = (parsed(learning, backend, kind) for backend in ("hf", "megatron"))
    assert hf.arguments == megatron.arguments
    assert (hf.dataset_path, hf.base_model) == (megatron.dataset_path, megatron.base_model)
    assert hf.arguments.use_lora == (kind == "LoRA")
    assert (hf.arguments.seed, hf.arguments.max_steps, hf.arguments.dtype) == (2, 7, "bfloat16")


def test_twelve_runs_of_different_names(learning):
    names = {one.name for one in learning.TRAININGS}
    assert len(names) == 12
    assert {"hf-full-1", "megatron-LoRA-3"} <= names


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))


def test_the_table_has_means_differences_and_what_is_missing(learning, tmp_path, monkeypatch):
    import record

    # One query, two candidates, the second relevant: 1 where it ranks first, 1 / log2(3) = .6309 where second.
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\tb\t1\n")
    candidates = [
        learning.RerankRow("q", "query", docid, "", "text", score)
        for docid, score in (("a", 2.0), ("b", 1.0))
    ]
    learning._write_candidates(tmp_path / "rerank.jsonl.gz", candidates)
    right, wrong = "q\ta\t0.0\nq\tb\t1.0\n", "q\ta\t1.0\nq\tb\t0.0\n"
    facts = {
        "gpus": "2 x X", "machine": "m", "versions": {"python": "3"}, "date": "2026-01-01",
        "command": "python benchmarks/learning.py --run FOLDER", "max_steps": 150, "runs": {},
    }  # fmt: skip
    files = {
        "facts.json": json.dumps(facts),
        "log.txt": "not a run\n",
        "untrained.txt": wrong,
        "hf-full-1.txt": right,
        "hf-full-2.txt": right,
        "hf-full-3.txt": right,
        "megatron-full-1.txt": right,
        "megatron-full-2.txt": wrong,
    }
    pack(tmp_path / "learning.tar.gz", files)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    learning.score(tmp_path, tmp_path / "learning.tar.gz")
    rows = json.loads((tmp_path / "results" / "learning.json").read_text())
    found = {row["method"]: row for row in rows}
    assert found["BM25"]["value"] == pytest.approx(0.6309, abs=1e-4)
    assert found["untrained"]["value"] == pytest.approx(0.6309, abs=1e-4)
    assert found["ours, hf"]["value"] == 1.0
    assert found["ours, hf"]["note"] == "seeds 1.000, 1.000, 1.000; goal 0.55: met"
    assert found["ours, megatron"]["value"] == pytest.approx((1 + 0.6309) / 2, abs=1e-4)
    assert found["ours, megatron"]["note"] == (
        "seeds 1.000, 0.631 of 3; goal 0.55: met; -0.185 to hf, goal 0.03: missed"
    )
    assert {row["gpus"] for row in rows} == {"2 x X"}
    assert len(rows) == 4
