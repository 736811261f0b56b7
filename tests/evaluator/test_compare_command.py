import csv
import json
import re

import pytest

from tevatron.core.errors import FormatError
from tevatron.evaluator.compare_command import main
from tevatron.evaluator.metrics_command import main as metrics
from tevatron.evaluator.results import read_results

QUERIES = [f"q{n:02}" for n in range(30)]


def command(*arguments, status=0):
    assert main([str(argument) for argument in arguments]) == status


@pytest.fixture
def results(tmp_path, capsys):
    """Three systems on the data sets `scifact` and `fiqa`, made by the metrics command."""
    qrels = "".join(f"{qid} 0 good 1\n" for qid in QUERIES)
    ranks = {
        "bm25": lambda n: 3 if n % 3 else 1,
        "ours": lambda n: 1 if n % 10 else 5,
        "twin": lambda n: 3 if n % 3 else 1,
    }
    for dataset in ("scifact", "fiqa"):
        (tmp_path / f"{dataset}.qrels").write_text(qrels)
        for name, rank in ranks.items():
            lines = [
                f"{qid} Q0 {'good' if place == rank(n) else f'bad{place}'} {place} {-place} x\n"
                for n, qid in enumerate(QUERIES)
                for place in range(1, 7)
            ]
            (tmp_path / "run").write_text("".join(lines))
            output = tmp_path / name / f"{dataset}.metrics.json"
            arguments = ["--qrels", tmp_path / f"{dataset}.qrels", "--ranklist", tmp_path / "run"]
            arguments += ["--output", output, "--per_query", "--k_values", 1, 10]
            assert metrics([str(argument) for argument in arguments]) == 0
            document = json.loads(output.read_text())
            output.write_text(json.dumps(document | {"dataset": dataset}))
    capsys.readouterr()
    return tmp_path


def test_systems_on_one_data_set(results, capsys):
    one = [f"{name}={results / name / 'fiqa.metrics.json'}" for name in ("bm25", "ours", "twin")]
    outputs = [results / f"table.{ending}" for ending in ("md", "tex", "csv", "html", "json")]
    flags = [part for path in outputs for part in ("--output", path)]
    command(*one, "--first_stage", "bm25", "--metrics", "ndcg@10", "mrr@1", *flags)
    out = capsys.readouterr().out
    assert re.search(r"\| bm25 +\| +0\.6667 \| +0\.3333 \|", out)
    assert "**0.9387\\*†** (+0.2720)" in out
    assert "ours against bm25 on fiqa, ndcg@10: won 18 (+0.5000 on average), lost 3 (-0.2798" in out
    assert "  won q01: 0.5000 -> 1.0000 (+0.5000)" in out
    assert "twin against bm25 on fiqa, ndcg@10: won 0, lost 0, same 30" in out
    assert all(path.stat().st_size > 100 for path in outputs)
    assert outputs[0].read_text() in out
    cells = json.loads(outputs[-1].read_text())["rows"][2]["cells"]
    assert cells["ndcg@10"]["p"] == {"t_test": 1.0, "randomisation": 1.0}


def test_queries_and_plots(results):
    one = [f"{name}={results / name / 'fiqa.metrics.json'}" for name in ("bm25", "ours")]
    command(
        *(*one, "--first_stage", "bm25", "--differences", results / "d.csv"),
        *("--bars", results / "bars.svg", "--waterfall", results / "waterfall.png"),
    )
    header, *rows = csv.reader((results / "d.csv").read_text().splitlines())
    assert header == ["system", "data set", "query_id", "metric", "before", "after", "delta"]
    assert rows[0] == ["ours", "fiqa", "q01", "ndcg@10", "0.5", "1.0", "0.5"]
    assert len(rows) == 30
    assert (results / "bars.svg").read_text().startswith("<?xml")
    assert (results / "waterfall.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_with_a_stored_sub_average(results, capsys):
    for forum in ("tex", "unix"):
        path = results / "ours" / f"cqadupstack-{forum}.metrics.json"
        path.write_text(json.dumps({"dataset": f"cqadupstack-{forum}", "ndcg": {"NDCG@10": 0.5}}))
    command(results / "bm25", results / "ours", "--benchmark", "beir15", "--first_stage", "bm25")
    captured = capsys.readouterr()
    assert "**BEIR-15, ndcg@10**" in captured.out
    assert "partial: ours has no value of 22 of 26 data sets" in captured.out
    assert "stored value" not in captured.err


def test_a_wrong_sub_average_is_told(tmp_path, capsys):
    from tevatron.evaluator.benchmarks.beir15 import FORUMS

    for name in [f"cqadupstack-{forum}" for forum in FORUMS] + ["cqadupstack"]:
        value = 0.4 if name == "cqadupstack" else 0.3
        document = {"dataset": name, "ndcg": {"NDCG@10": value}}
        (tmp_path / f"{name}.metrics.json").write_text(json.dumps(document))
    command(tmp_path, "--benchmark", "beir15")
    captured = capsys.readouterr()
    assert (
        "cqadupstack: the stored value 0.40000 is not the mean of its parts, 0.30000"
        in captured.err
    )
    assert "| cqadupstack |" in captured.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bm25", "ours"], "results of 2 data sets, such as fiqa, scifact: name the --benchmark"),
        (["bm25", "bm25"], "two systems are called 'bm25'"),
        (["bm25", "--first_stage", "bm52"], "unknown system 'bm52'; there are: bm25"),
        (["bm25", "--metrics", "mrr@5", "--benchmark", "beir15"], "unknown metric 'mrr@5'"),
        (["bm25", "--output", "t.pdf"], "--output t.pdf: expected a name that ends with .md, .tex"),
        (["nowhere"], "nowhere: no such file"),
        (["empty"], "expected files <data set>.metrics.json, got none"),
        (["bm25/fiqa.metrics.json", "--waterfall", "w.png"], "--waterfall needs --first_stage"),
    ],
)
def test_mistakes(results, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(results)
    (results / "empty").mkdir()
    command(*arguments, status=2)
    assert says in capsys.readouterr().err


def test_the_references_file_is_read(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"dataset": "x", "ndcg": {"NDCG@10": 0.5}, "precision": {"P@1": 1}}))
    assert read_results(path).means == {"ndcg@10": 0.5, "precision@1": 1.0}
    path.write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        read_results(path)
    path.write_text('{"dataset": "x", "ndcg": {"NDCG@10": "high"}}')
    with pytest.raises(FormatError, match=r"field 'ndcg\.NDCG@10': expected a number, got 'high'"):
        read_results(path)
    path.write_text('{"dataset": "x"}')
    with pytest.raises(FormatError, match="expected one of the blocks ndcg, map"):
        read_results(path)
