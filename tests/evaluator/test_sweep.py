"""Sweeps as people run them: `python -m tevatron.eval.run` and `...summary`, killed, begun again, with changed parts."""

import json
import os
import random
import signal
import subprocess
import threading

import pytest
import pytrec_eval
from tests.support.commands import call
from tests.support.processes import python, running, wait_for

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import read_ranklist
from tevatron.evaluator import run_command, summary_command
from tevatron.evaluator.benchmarks import BENCHMARKS, Benchmark, Dataset, Unit, get_benchmark
from tevatron.evaluator.inputs import find_inputs

NAMES = get_benchmark("beir15").names()


def home(tmp_path):
    return {"TEVATRON_HOME": str(tmp_path / "home")}


def sweep(tmp_path, *arguments, check=0, **flags):
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    words = [*given, *arguments]
    return call(run_command.main, words, environment=home(tmp_path), check=check)


def shared_qrels(shared_data, name):
    return read_qrels(shared_data / "beir15" / f"qrels.{name}.txt.gz")


def make_run(qrels, *, depth, seed):
    """Return a run with a part of the relevant documents somewhere among others."""
    draw = random.Random(seed)
    run = {}
    for query_id, grades in qrels.items():
        relevant = [docid for docid in grades if draw.random() < 0.7][: depth // 2]
        others = [f"other{n}" for n in range(depth - len(relevant))]
        documents = relevant + others
        draw.shuffle(documents)
        run[query_id] = {docid: float(depth - place) for place, docid in enumerate(documents)}
    return run


@pytest.fixture
def runs(tmp_path, shared_data):
    """Runs of three documents a query over all 26 data sets; only some of their queries, so that it is quick."""
    for name in NAMES:
        qrels = dict(list(shared_qrels(shared_data, name).items())[:40])
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        with (folder / "rank.text").open("w") as file:
            for query_id, documents in make_run(qrels, depth=10, seed=name).items():
                file.writelines(
                    f"{query_id}\t{docid}\t{score}\n" for docid, score in documents.items()
                )
    return tmp_path / "runs"


def test_benchmark_is_scored_from_runs_as_pytrec_eval_does(tmp_path, runs, shared_data):
    done = sweep(
        tmp_path,
        ranklist_pattern=runs / "{dataset}" / "rank.text",
        beir_cache_dir=shared_data / "beir15",
        results_dir=tmp_path / "out",
        name="mine",
    )
    table = (tmp_path / "out" / "summary.md").read_text()
    assert table in done.stdout
    assert table.startswith("**mine: BEIR-15**\n")
    values = {}
    for name in NAMES:
        found = json.loads((tmp_path / "out" / f"{name}.metrics.json").read_text())
        qrels, run = shared_qrels(shared_data, name), read_ranklist(runs / name / "rank.text")
        evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"})
        by_query = evaluator.evaluate(run)
        expected = sum(entry["ndcg_cut_10"] for entry in by_query.values()) / len(qrels)
        assert found["ndcg"]["NDCG@10"] == pytest.approx(expected, abs=1e-12)
        assert set(found["per_query"]) == {"ndcg@10", "recall@200", "ndcg@100"}
        assert found["per_query"]["ndcg@10"] == {
            query_id: by_query.get(query_id, {"ndcg_cut_10": 0.0})["ndcg_cut_10"]
            for query_id in qrels
        }
        assert list(found)[:5] == [
            "dataset",
            "benchmark",
            "split",
            "n_queries_qrels",
            "n_queries_ranked",
        ]
        assert (found["dataset"], found["split"]) == (name, "dev" if name == "msmarco" else "test")
        assert set(found["recall"]) == {"Recall@10", "Recall@100", "Recall@200", "Recall@1000"}
        values[name] = expected
    forums = [value for name, value in values.items() if name.startswith("cqadupstack-")]
    units = [v for n, v in values.items() if not n.startswith("cqadupstack-")]
    mean = (sum(units) + sum(forums) / 12) / 15
    (last,) = (line for line in table.splitlines() if "average of 15" in line)
    assert last.split("|")[2].strip() == f"{mean:.4f}"
    assert sum(line.startswith("| ") for line in table.splitlines()) == 1 + 1 + 15 + 1


def test_result_is_taken_again_only_where_all_of_it_is_the_same(tmp_path, runs, shared_data):
    flags = {
        "ranklist_pattern": runs / "{dataset}" / "rank.text",
        "beir_cache_dir": shared_data / "beir15",
        "results_dir": tmp_path / "out",
    }
    some = ("--datasets", "scifact", "nfcorpus")
    table = sweep(tmp_path, *some, **flags).stdout
    assert "average of" not in table
    assert "24 of 26 data sets are missing" in table
    assert "there is no average" in table
    paths = {name: tmp_path / "out" / f"{name}.metrics.json" for name in ("scifact", "nfcorpus")}
    before = {name: path.stat().st_mtime_ns for name, path in paths.items()}

    def changed(*arguments, **more):
        nonlocal before
        sweep(tmp_path, *some, *arguments, **flags | more)
        after = {name: path.stat().st_mtime_ns for name, path in paths.items()}
        names = {name for name in paths if after[name] != before[name]}
        before = after
        return names

    assert changed() == set()
    with (runs / "scifact" / "rank.text").open("a") as file:
        file.write("1\tone-more\t0.5\n")
    assert changed() == {"scifact"}
    assert changed(k_values=5) == {"scifact", "nfcorpus"}
    assert changed("--overwrite", k_values=5) == {"scifact", "nfcorpus"}
    # Other judgments under the same name.
    for name in paths:
        folder = tmp_path / "qrels" / name / "qrels"
        folder.mkdir(parents=True)
        rows = [
            (q, d, g)
            for q, grades in shared_qrels(shared_data, name).items()
            for d, g in grades.items()
        ]
        if name == "nfcorpus":
            rows = [(q, d, 2) for q, d, _ in rows]
        (folder / "test.tsv").write_text("".join(f"{q}\t{d}\t{g}\n" for q, d, g in rows))
    assert changed(k_values=5, beir_cache_dir=tmp_path / "qrels") == {"nfcorpus"}


def test_partial_sweep_is_refused_or_marked(tmp_path, runs, shared_data):
    for name in ("fever", "cqadupstack-gis", "cqadupstack-tex"):
        (runs / name / "rank.text").unlink()
    flags = {
        "ranklist_pattern": runs / "{dataset}" / "rank.text",
        "beir_cache_dir": shared_data / "beir15",
        "results_dir": tmp_path / "out",
    }
    done = sweep(tmp_path, **flags, check=2)
    assert "3 of 26 data sets of beir15 have no file, such as" in done.stderr
    assert not list((tmp_path / "out").glob("*.json"))
    table = sweep(tmp_path, "--allow_partial", **flags).stdout
    (last,) = (line for line in table.splitlines() if "average of 14 of 15" in line)
    assert last.count("(partial)") == 3
    (forums,) = (line for line in table.splitlines() if line.startswith("| cqadupstack"))
    assert forums.count("(partial)") == 3
    assert "| fever" in table
    assert (
        "partial: 3 of 26 data sets are missing (fever, cqadupstack-gis, cqadupstack-tex)" in table
    )
    words = ["--results_dir", tmp_path / "out", "--output", tmp_path / "s.md"]
    refused = call(summary_command.main, words, check=2)
    assert "results of 23 of 26 data sets of beir15" in refused.stderr
    assert call(summary_command.main, [*words, "--allow_partial"]).stdout == table
    assert (tmp_path / "s.md").read_text() == table


@pytest.fixture
def reranking(tmp_path):
    """Three small sets with BM25-like candidates, their judgments, and the command's flags for them."""
    qrels_dir, inputs = tmp_path / "qrels", tmp_path / "inputs"
    for name in ("scifact", "nfcorpus", "fiqa"):
        draw = random.Random(name)
        (inputs / name).mkdir(parents=True)
        with (inputs / name / "rerank.jsonl").open("w") as file:
            for q in range(20):
                for d in range(10):
                    row = {
                        "query_id": f"{q}",
                        "query": f"what is thing {q}",
                        "docid": f"d{d}",
                        "title": "",
                        "text": f"thing {q if d == 3 else d} " + "word " * draw.randrange(5),
                        "score": float(-d),
                    }
                    file.write(json.dumps(row) + "\n")
        (qrels_dir / name / "qrels").mkdir(parents=True)
        (qrels_dir / name / "qrels" / "test.tsv").write_text(
            "".join(f"{q}\td3\t1\n" for q in range(20))
        )
    return {
        "rerank_input_pattern": inputs / "{dataset}" / "rerank.jsonl",
        "beir_cache_dir": qrels_dir,
        "benchmark": "three",
    }


THREE = Benchmark(
    name="three",
    title="Three",
    datasets=tuple(Dataset(name=name) for name in ("scifact", "nfcorpus", "fiqa")),
    units=(Unit("scifact", ("scifact",)), Unit("medicine and money", ("nfcorpus", "fiqa"))),
    columns=("ndcg@10", "recall@5"),
)


@pytest.fixture
def command(reranking, tmp_path, monkeypatch):
    """Return the words of a sweep over the three sets."""
    monkeypatch.setitem(BENCHMARKS, "three", THREE)

    def make(results, *urls, arguments=()):
        given = [word for name, value in reranking.items() for word in (f"--{name}", str(value))]
        where = ["--results_dir", str(tmp_path / results), "--backends", *urls]
        return [*given, *where, "--chunk_size", "7", *arguments]

    return make


def run(words, tmp_path, *, check=0):
    return call(run_command.main, words, environment=home(tmp_path), check=check)


def process(words):
    """Return the command line of a process that knows the private benchmark, to be killed."""
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.evaluator.test_sweep import BENCHMARKS, THREE, run_command\n"
        "BENCHMARKS['three'] = THREE\n"
        "sys.exit(run_command.main())\n"
    )
    return python("-c", program, *words)


@pytest.mark.parametrize(
    "module",
    [
        "tevatron.eval.run",
        "tevatron.eval.summary",
        "tevatron.utils.annotate_with_teacher",
        "tevatron.utils.mine_hard_negatives",
    ],
)
def test_commands_are_modules_with_the_references_names(module):
    words = python("-W", "error", "-m", module, "--help")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: python -m {module} ")


def test_candidates_are_reranked_by_all_backends_and_scored(tmp_path, command, start_scorer):
    scorers = [start_scorer(), start_scorer()]
    done = run(command("out", *(s.url for s in scorers)), tmp_path)
    assert sum(scorer.num_pairs for scorer in scorers) <= 3 * 200
    for name in THREE.names():
        ranked = read_ranklist(tmp_path / "out" / f"{name}.rerank.text")
        assert {query: len(documents) for query, documents in ranked.items()} == {
            f"{q}": 10 for q in range(20)
        }
        found = json.loads((tmp_path / "out" / f"{name}.metrics.json").read_text())
        evaluator = pytrec_eval.RelevanceEvaluator(
            {f"{q}": {"d3": 1} for q in range(20)}, {"ndcg_cut.10"}
        )
        by_query = evaluator.evaluate(ranked)
        expected = sum(entry["ndcg_cut_10"] for entry in by_query.values()) / 20
        assert found["ndcg"]["NDCG@10"] == pytest.approx(expected, abs=1e-12)
    assert "| medicine and money |" in done.stdout
    assert not list((tmp_path / "out" / "scores").iterdir())
    # Begun again, nothing is scored.
    again = start_scorer()
    assert run(command("out", again.url), tmp_path).stdout == done.stdout
    assert again.num_pairs == 0


def test_sweep_killed_in_the_middle_ends_with_the_same_table_and_scores_nothing_twice(
    tmp_path, command, start_scorer
):
    whole = run(command("whole", start_scorer().url), tmp_path).stdout.replace("**whole:", "**out:")
    scorer = start_scorer()
    hold = threading.Event()
    distinct = set()
    scorer.before_answer = lambda pairs: len(distinct) < 250 or hold.wait(30)
    scorer.on_body = lambda body: distinct.update(
        (pair["query"], pair["text"]) for pair in body["candidates"]
    )
    with running(
        process(command("out", scorer.url)), environment=os.environ | home(tmp_path)
    ) as killed:
        wait_for(lambda: len(distinct) >= 250, timeout_s=60, what="the middle of the sweep")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    hold.set()
    kept = sum(
        len(json.loads(line)["scores"])
        for path in (tmp_path / "out" / "scores").iterdir()
        for line in path.read_text().splitlines()
    )
    done = [name for name in THREE.names() if (tmp_path / "out" / f"{name}.metrics.json").is_file()]
    assert len(done) < 3
    again = start_scorer()
    assert run(command("out", again.url), tmp_path).stdout == whole
    # What was stored, in logs or in ranked lists, is not asked for again.
    in_lists = sum(_num_distinct(tmp_path, name) for name in done)
    total = sum(_num_distinct(tmp_path, name) for name in THREE.names())
    assert again.num_pairs == total - in_lists - kept


def _num_distinct(tmp_path, name):
    rows = map(json.loads, (tmp_path / "inputs" / name / "rerank.jsonl").read_text().splitlines())
    return len({(row["query"], row["text"]) for row in rows})


def test_changed_checkpoint_reuses_nothing(tmp_path, command, start_scorer):
    first, second = start_scorer(), start_scorer()
    before = run(command("out", first.url), tmp_path).stdout
    second.info["contract_sha256"] = "d" * 64
    second.worsen()
    after = run(command("out", second.url), tmp_path).stdout
    assert second.num_pairs == first.num_pairs
    assert after != before
    # The first one's results are gone, not mixed in.
    assert run(command("fresh", second.url), tmp_path).stdout.replace("**fresh:", "**out:") == after


def test_results_of_two_checkpoints_have_no_average(tmp_path, command, start_scorer):
    run(command("out", start_scorer().url), tmp_path)
    other = start_scorer()
    other.info["contract_sha256"] = "d" * 64
    done = run(command("out", other.url, arguments=("--datasets", "fiqa")), tmp_path, check=2)
    assert "the results of scifact and fiqa are of different systems" in done.stderr


def test_touched_list_is_made_again(tmp_path, command, start_scorer):
    whole = run(command("out", start_scorer().url), tmp_path).stdout
    path = tmp_path / "out" / "fiqa.rerank.text"
    path.write_text(path.read_text().replace("\td3\t", "\td33\t"))
    again = start_scorer()
    assert run(command("out", again.url), tmp_path).stdout == whole
    assert again.num_pairs == _num_distinct(tmp_path, "fiqa")


def test_second_sweep_in_the_same_folder_is_kept_out(tmp_path, command, start_scorer):
    scorer = start_scorer()
    hold = threading.Event()
    scorer.before_answer = lambda pairs: hold.wait(30)
    with running(process(command("out", scorer.url)), environment=os.environ | home(tmp_path)):
        wait_for(lambda: scorer.requests, timeout_s=60)
        done = run(command("out", start_scorer().url), tmp_path, check=2)
        hold.set()
    assert "another sweep works in" in done.stderr


def test_scorer_that_refuses_the_prefix_ends_the_sweep(tmp_path, command, start_scorer):
    scorer = start_scorer()
    scorer.answers.extend([(422, {}, {"detail": "query_prefix differs"})] * 4)
    arguments = ("--query_prefix", "q:")
    done = run(command("out", scorer.url, arguments=arguments), tmp_path, check=2)
    assert "422 query_prefix differs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected --ranklist_pattern PATH with {dataset} in it"),
        (
            ["--ranklist_pattern", "x/rank.text"],
            "expected {dataset} in the pattern, got 'x/rank.text'",
        ),
        (["--backends", "http://a"], "expected --rerank_input_pattern PATH with {dataset} in it"),
        (
            ["--backends", "http://a", "--ranklist_pattern", "{dataset}"],
            "--backends rerank the candidates of --rerank_input_pattern",
        ),
        (["--rerank_input_pattern", "{dataset}"], "--rerank_input_pattern needs --backends"),
        (
            ["--ranklist_override", "scifact"],
            "--ranklist_override: expected DATASET=PATH, got 'scifact'",
        ),
        (["--ranklist_override", "scifacts=x"], "Did you mean 'scifact'?"),
        (["--benchmark", "beir51", "--ranklist_pattern", "{dataset}"], "Did you mean 'beir15'?"),
    ],
)
def test_flags_that_do_not_go_together_say_so(tmp_path, arguments, says):
    done = sweep(tmp_path, "--results_dir", tmp_path / "out", *arguments, check=2)
    assert says in done.stderr


def test_compressed_runs_are_found_under_the_plain_name(tmp_path):
    (tmp_path / "rank.text.gz").write_bytes(b"")
    found = find_inputs(
        THREE,
        ["fiqa"],
        pattern=None,
        overrides={"fiqa": tmp_path / "rank.text"},
        allow_partial=False,
    )
    assert found == {"fiqa": tmp_path / "rank.text.gz"}
    with pytest.raises(InputError, match="1 of 1 data sets of three have no file"):
        find_inputs(THREE, ["fiqa"], pattern="no/{dataset}", overrides={}, allow_partial=True)
    with pytest.raises(ConfigError, match="unknown data set of three 'fiqu'"):
        find_inputs(THREE, ["fiqu"], pattern="no/{dataset}", overrides={}, allow_partial=True)
