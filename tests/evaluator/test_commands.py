"""The commands as people run them: `python -m ...` in a process of its own."""

import gzip
import json
import subprocess
import sys

import pytest

QRELS = "q1 0 a 1\nq1 0 b 0\nq2 0 c 2\nq3 0 d 1\n"
RUN = "q1\tb\t2.0\nq1\ta\t1.0\nq2\tc\t1.5\nq9\tz\t1\n"


def command(module, *arguments, check=0):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def files(tmp_path):
    (tmp_path / "qrels.txt").write_text(QRELS)
    (tmp_path / "run.txt").write_text(RUN)
    return tmp_path


def metrics(files, *arguments, **options):
    return command(
        "tevatron.eval.metrics",
        "--ranklist",
        files / "run.txt",
        "--output",
        files / "out" / "m.json",
        *arguments,
        **options,
    )


def test_metrics_are_written_in_the_references_form_unrounded(files):
    done = metrics(files, "--qrels", files / "qrels.txt", "--k_values", 1, 10)
    found = json.loads((files / "out" / "m.json").read_text())
    assert found["dataset"] == "qrels.txt"
    assert found["n_queries_qrels"] == 3
    assert found["n_queries_ranked"] == 3
    assert found["ndcg"] == {
        "NDCG@1": 1 / 3,
        "NDCG@10": pytest.approx((0.6309297535714575 + 1) / 3, abs=1e-15),
    }
    assert found["map"] == {"MAP@1": 1 / 3, "MAP@10": 0.5}
    assert found["mrr"] == {"MRR@1": 1 / 3, "MRR@10": 0.5}
    assert found["recall"] == {"Recall@1": 1 / 3, "Recall@10": 2 / 3}
    assert found["precision"] == {"P@1": 1 / 3, "P@10": pytest.approx(0.2 / 3)}
    assert found["n_queries_missing"] == 1
    assert "-c" in found["variant"]
    assert done.stdout.splitlines()[0].split() == ["|", "qrels.txt", "|", "@1", "|", "@10", "|"]
    assert done.stdout.splitlines()[2].split() == ["|", "ndcg", "|", "0.3333", "|", "0.5436", "|"]
    assert "1 of 3 judged queries are not in the run and count 0, such as ['q3']" in done.stderr
    assert "1 queries of the run are not judged and are ignored, such as ['q9']" in done.stderr


def test_compressed_run_and_beir_folder_give_the_same_numbers(files):
    (files / "set" / "qrels").mkdir(parents=True)
    rows = [line.split() for line in QRELS.splitlines()]
    (files / "set" / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{g}\n" for q, _, d, g in rows)
    )
    (files / "set" / "corpus.jsonl").write_text("")
    (files / "set" / "queries.jsonl").write_text("")
    (files / "run.gz").write_bytes(gzip.compress(RUN.encode()))
    metrics(files, "--qrels", files / "qrels.txt")
    plain = json.loads((files / "out" / "m.json").read_text())
    command(
        "tevatron.eval.metrics",
        "--dataset",
        files / "set",
        "--ranklist",
        files / "run.gz",
        "--output",
        files / "n.json",
    )
    folder = json.loads((files / "n.json").read_text())
    assert (folder.pop("dataset"), folder.pop("split")) == ("set", "test")
    assert folder == {key: value for key, value in plain.items() if key not in ("dataset", "split")}
    assert list(plain["ndcg"]) == ["NDCG@10", "NDCG@100", "NDCG@200", "NDCG@1000"]


def test_documents_with_the_querys_id_are_removed_when_asked(files):
    (files / "run.txt").write_text("q1 q1 9\nq1 a 1\n")
    metrics(files, "--qrels", files / "qrels.txt", "--k_values", 10)
    assert json.loads((files / "out" / "m.json").read_text())["mrr"]["MRR@10"] == pytest.approx(
        0.5 / 3
    )
    done = metrics(files, "--qrels", files / "qrels.txt", "--k_values", 10, "--remove_query")
    found = json.loads((files / "out" / "m.json").read_text())
    assert (found["mrr"]["MRR@10"], found["n_removed"]) == (pytest.approx(1 / 3), 1)
    assert "1 documents that must not count for their query were removed" in done.stderr


@pytest.mark.parametrize(
    ("run", "arguments", "says"),
    [
        ("q1 a x\n", [], "run.txt:1: field 'score': expected a number, got 'x'"),
        (
            "q1 a 1\n\nq1 a 2\n",
            [],
            "run.txt:3: field 'docid': document 'a' is given twice for query 'q1'",
        ),
        (
            "q1 a nan\n",
            [],
            "run.txt:1: field 'score': the score of document 'a' of query 'q1' is NaN",
        ),
        (
            "q1.0 a 1\n",
            [],
            "no query of the run is judged: the qrels have 3 queries such as 'q1', 'q2', 'q3'",
        ),
        (RUN, ["--k_values", "0"], "the cut-off of 'ndcg@0' must be between 1 and"),
        (RUN, ["--ranklist", "nowhere"], "nowhere: no such file"),
        (RUN, ["--relevance_level", "0"], "the relevance level must be 1 or more, got 0"),
    ],
)
def test_mistake_is_one_line_and_leaves_no_output(files, run, arguments, says):
    (files / "run.txt").write_text(run)
    done = metrics(files, "--qrels", files / "qrels.txt", *arguments, check=2)
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert not (files / "out" / "m.json").exists()


def test_float_grade_is_refused_with_its_line(files):
    (files / "qrels.txt").write_text("q1 0 a 0.9\n")
    done = metrics(files, "--qrels", files / "qrels.txt", check=2)
    assert "qrels.txt:1: field 'score': expected a whole number, got '0.9'" in done.stderr


def test_qrels_or_dataset_is_needed(files):
    assert "one of the arguments --qrels --dataset is required" in metrics(files, check=2).stderr


def test_scifact_through_both_commands(shared_data, tmp_path):
    done = command(
        "tevatron.utils.bm25",
        "--dataset",
        shared_data / "scifact",
        "--output",
        tmp_path / "run.txt",
        "--depth",
        100,
    )
    assert "documents for 300 queries" in done.stdout
    first = (tmp_path / "run.txt").read_text().splitlines()[0].split()
    assert (len(first), first[1], first[3]) == (6, "Q0", "1")
    command(
        "tevatron.eval.metrics",
        *(
            "--dataset",
            shared_data / "scifact",
            "--ranklist",
            tmp_path / "run.txt",
            "--output",
            tmp_path / "m.json",
        ),
    )
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["ndcg"]["NDCG@10"] == pytest.approx(0.6769, abs=0.005)
    assert found["recall"]["Recall@100"] == pytest.approx(0.9287, abs=0.01)
    # Ours to the digit, as measured when this was written.
    assert found["ndcg"]["NDCG@10"] == pytest.approx(0.6768873734115011, abs=1e-6)


def test_prepare_says_what_it_made(tmp_path):
    sample = tmp_path / "in"
    (sample / "qrels").mkdir(parents=True)
    (sample / "corpus.jsonl").write_text(
        '{"_id": "a", "text": "green tea"}\n{"_id": "b", "text": "black tea"}\n'
    )
    (sample / "queries.jsonl").write_text(
        '{"_id": "p", "text": "green tea"}\n{"_id": "q", "text": "black tea"}\n'
    )
    (sample / "qrels" / "test.tsv").write_text("p\ta\t1\nq\tb\t1\n")
    arguments = ("--dataset", sample, "--output_dir", tmp_path / "out")
    done = command("tevatron.utils.prepare_training_data", *arguments, "--queries", 1)
    assert "train.jsonl: 1 queries, 1 positives, 1 negatives" in done.stdout
    assert "heldout: 1 queries held out" in done.stdout
    assert (
        "say with --queries"
        in command("tevatron.utils.prepare_training_data", *arguments, check=2).stderr
    )


@pytest.mark.parametrize(
    "module",
    [
        "tevatron.evaluator.main",
        "tevatron.eval.compare",
        "tevatron.eval.metrics",
        "tevatron.utils.bm25",
        "tevatron.utils.prepare_training_data",
    ],
)
def test_torch_is_not_imported(module):
    program = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
