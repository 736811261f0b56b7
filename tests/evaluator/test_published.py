"""Published values and trec_eval's own answers, through the command line."""

import gzip
import json
import random

import pytest

from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import write_ranklist
from tevatron.evaluator.benchmarks import get_benchmark
from tevatron.evaluator.metrics_command import main


@pytest.fixture
def metrics(tmp_path):
    """Run the command in this process; return its metrics.json."""

    def run(ranklist, *arguments, status=0):
        output = tmp_path / "metrics.json"
        argv = ["--ranklist", ranklist, "--output", output, *arguments]
        assert main([str(argument) for argument in argv]) == status
        return json.loads(output.read_text()) if status == 0 else None

    return run


DL19 = {
    # System: nDCG@10 and MAP@100 (relevant from grade 2) as the RankVicuna paper prints them, recall@100 from grade 1.
    "retrieve/BM25.trec_results": (0.5058, 0.2476, 0.4531),
    "retrieve/BM25_RM3.trec_results": (0.5216, 0.2807, 0.4821),
    "retrieve/OPEN_AI_ADA2.trec_results": (0.7035, 0.4151, 0.5256),
    "retrieve/D_BERT_KD_TASB.trec_results": (0.7210, 0.4050, 0.5158),
    "retrieve/SPLADE_P_P_ENSEMBLE_DISTIL.trec_results": (0.7308, 0.4464, 0.5549),
    "rerank/BM25.rankvicuna7b.top20": (0.6164, 0.2867, 0.4531),
    "rerank/BM25.rankvicuna7b.top100": (0.6682, 0.3316, 0.4531),
    "rerank/BM25_RM3.rankvicuna7b.top20": (0.6053, 0.3110, 0.4821),
    "rerank/BM25_RM3.rankvicuna7b.top100": (0.6588, 0.3573, 0.4821),
    "rerank/OPEN_AI_ADA2.rankvicuna7b.top20": (0.7448, 0.4398, 0.5256),
    "rerank/OPEN_AI_ADA2.rankvicuna7b.top100": (0.7374, 0.4409, 0.5256),
    "rerank/D_BERT_KD_TASB.rankvicuna7b.top20": (0.7588, 0.4121, 0.5158),
    "rerank/D_BERT_KD_TASB.rankvicuna7b.top100": (0.7551, 0.4170, 0.5158),
    "rerank/SPLADE_P_P_ENSEMBLE_DISTIL.rankvicuna7b.top20": (0.7532, 0.4491, 0.5549),
    "rerank/SPLADE_P_P_ENSEMBLE_DISTIL.rankvicuna7b.top100": (0.7459, 0.4416, 0.5549),
}


@pytest.mark.parametrize("name", DL19)
def test_dl19_runs(shared_data, metrics, name):
    run = next((shared_data / "runs" / "rank_llm").glob(f"{name}*dl19.txt.gz"))
    qrels = ("--beir_cache_dir", shared_data / "qrels", "--benchmark", "dl19", "--dataset", "dl19")
    found = metrics(run, *qrels)
    ndcg, mean_precision, recall = DL19[name]
    assert found["relevance_level"] == 2
    assert round(found["ndcg"]["NDCG@10"], 4) == ndcg
    assert round(found["map"]["MAP@100"], 4) == mean_precision
    plain = metrics(run, *qrels, "--relevance_level", 1)
    assert round(plain["recall"]["Recall@100"], 4) == recall
    assert plain["ndcg"] == found["ndcg"]


def test_the_levels_of_a_published_run(shared_data, metrics):
    run = shared_data / "runs/rank_llm/rerank/BM25.rankvicuna7b.top100.dl19.txt.gz"
    qrels = ("--qrels", shared_data / "qrels" / "qrels.dl19-passage.txt", "--k_values", 10, 20, 100)
    one, two = metrics(run, *qrels), metrics(run, *qrels, "--relevance_level", 2)
    assert [round(found["map"]["MAP@100"], 4) for found in (one, two)] == [0.3617, 0.3316]
    assert [round(found["recall"]["Recall@100"], 4) for found in (one, two)] == [0.4531, 0.4910]
    assert round(one["recall"]["Recall@20"], 4) == 0.2617


def test_rank_llms_json_gives_the_values_of_its_run(shared_data, metrics):
    folder = shared_data / "runs" / "rank_llm" / "retrieve"
    qrels = ("--qrels", shared_data / "qrels" / "qrels.dl19-passage.txt")
    found = metrics(folder / "BM25.retrieve_results_dl19.json.gz", *qrels)
    assert found == metrics(folder / "BM25.trec_results_dl19.txt.gz", *qrels)


@pytest.mark.parametrize(
    ("system", "ndcg", "recall"),
    [("BM25", 0.5947, 0.1091), ("SPLADE_P_P_ENSEMBLE_DISTIL", 0.7274, 0.1282)],
)
def test_trec_covid_runs(shared_data, metrics, system, ndcg, recall):
    run = shared_data / "runs" / "rank_llm" / "retrieve" / f"{system}.trec_results_covid.txt.gz"
    found = metrics(run, "--dataset", "trec-covid", "--beir_cache_dir", shared_data / "beir15")
    assert round(found["ndcg"]["NDCG@10"], 4) == ndcg
    assert round(found["recall"]["Recall@100"], 4) == recall
    assert (found["n_queries_qrels"], found["n_removed"], found["split"]) == (50, 0, "test")


@pytest.mark.parametrize(
    ("dataset", "run", "ndcg", "recall"),
    [
        ("scifact", "run.bm25s.top100.txt", 0.6769, 0.9287),
        ("scifact", "run.all-MiniLM-L6-v2.top100.txt", 0.6451, 0.9250),
        ("scifact", "run.bm25s.top100.rerank.all-MiniLM-L6-v2.txt", 0.6690, 0.9287),
        ("cranfield", "run.bm25s.top100.txt", 0.3157, 0.7177),
        ("noveleval", "run.smollm2-135m-instruct-q4_1.ql.txt", 0.7051, 1.0),
        ("noveleval", "run.smollm2-135m-instruct-q4_1.yesno.txt", 0.3253, 1.0),
        ("noveleval", "candidates.rank_llm.json", 0.6503, 1.0),
    ],
)
def test_small_collections(shared_data, metrics, dataset, run, ndcg, recall):
    if not (shared_data / dataset / run).exists():
        pytest.skip(f"no {dataset}/{run} in the published data")
    found = metrics(shared_data / dataset / run, "--dataset", shared_data / dataset)
    assert round(found["ndcg"]["NDCG@10"], 4) == ndcg
    assert round(found["recall"]["Recall@100"], 4) == recall


def test_noveleval_at_1_and_5(shared_data, metrics):
    found = metrics(
        shared_data / "noveleval" / "candidates.rank_llm.json",
        *("--dataset", shared_data / "noveleval", "--k_values", 1, 5),
    )
    assert [round(value, 4) for value in found["ndcg"].values()] == [0.6429, 0.5824]


@pytest.mark.parametrize("dataset", get_benchmark("beir15").names())
def test_a_perfect_run_scores_1_on_every_beir_set(shared_data, metrics, tmp_path, dataset):
    qrels = read_qrels(shared_data / "beir15" / f"qrels.{dataset}.txt.gz")
    run = {qid: {d: float(g) for d, g in grades.items() if g > 0} for qid, grades in qrels.items()}
    write_ranklist(tmp_path / "run", run)
    found = metrics(
        tmp_path / "run",
        *("--dataset", dataset, "--beir_cache_dir", shared_data / "beir15", "--k_values", 10),
    )
    assert found["ndcg"] == {"NDCG@10": 1.0}
    assert (found["mrr"], found["success"]) == ({"MRR@10": 1.0}, {"Success@10": 1.0})
    assert (found["rprec"], found["capped_recall"]) == ({"Rprec": 1.0}, {"R_cap@10": 1.0})
    assert (found["n_queries_missing"], found["n_removed"]) == (0, 0)


@pytest.mark.parametrize(
    ("run", "expected", "arguments"),
    [
        ("results.test", "out.test.aq", ()),
        ("results.trunc", "out.test.aqc", ()),
        ("results.test", "out.test.aql", ("--relevance_level", "2")),
    ],
)
def test_trec_evals_own_expected_outputs(shared_data, metrics, run, expected, arguments):
    folder = shared_data / "oracle" / "trec_eval_tests"
    blocks = {"ndcg_cut": "ndcg", "map_cut": "map", "P": "precision"}
    wanted = {}
    for line in (folder / expected).read_text().splitlines():
        measure, query, value = line.split()
        base, _, k = measure.rpartition("_")
        if base in ("ndcg_cut", "recall", "map_cut", "P", "success") and k.isdecimal():
            wanted[f"{blocks.get(base, base)}@{k}", query] = float(value)
        elif measure in ("recip_rank", "Rprec"):
            wanted["mrr@1000" if measure == "recip_rank" else "rprec", query] = float(value)
    ks = sorted({name.partition("@")[2] for name, _ in wanted} - {""}, key=int)
    qrels = folder / ("qrels.rel_level" if arguments else "qrels.test")
    found = metrics(folder / run, "--qrels", qrels, "--per_query", "--k_values", *ks, *arguments)
    got = {(m, q): v for m, values in found["per_query"].items() for q, v in values.items()}
    for metric, values in found["per_query"].items():
        got[metric, "all"] = sum(values.values()) / len(values)
    assert len(wanted) == 4 * 41
    assert {key: round(got[key], 4) for key in wanted} == wanted


PITFALLS = {
    "ndcg_cut_3": ("ndcg", "NDCG@3"),
    "ndcg": ("ndcg", "NDCG@1000"),
    "map": ("map", "MAP@1000"),
    "recip_rank": ("mrr", "MRR@1000"),
    "P_1": ("precision", "P@1"),
    "recall_10": ("recall", "Recall@10"),
}
REFUSED = {
    "nan_score": "the score of document 'a' of query 'q1' is NaN",
    "duplicate_docs": "document 'a' is given twice for query 'q1'",
}
ELSEWHERE = {
    "missing_query_no_c": "missing_query_c",  # the same files, with -c
    "depth_M": None,  # -M 2 cuts the run: test_bug_reports
}


def test_every_pitfall_as_trec_eval_with_c_answers_it(shared_data, metrics, tmp_path, capsys):
    cases = json.loads((shared_data / "oracle" / "pitfall_cases.json").read_text())
    checked = 0
    for name, case in cases.items():
        qrels, run = tmp_path / "qrels", tmp_path / "run"
        qrels.write_text("\n".join(case["qrels"]))
        run.write_text("\n".join(case["run"]))
        arguments = ("--qrels", qrels, "--k_values", 1, 3, 10, 1000)
        if name in REFUSED:
            metrics(run, *arguments, status=2)
            assert REFUSED[name] in capsys.readouterr().err
            continue
        found = metrics(run, *arguments)
        answers = cases[ELSEWHERE.get(name) or name]["results"]["trec_eval_9.0.8"]
        for measure, (block, label) in PITFALLS.items():
            if measure in answers and name != "depth_M":
                assert round(found[block][label], 4) == float(answers[measure]), (name, measure)
                checked += 1
    assert (len(cases), checked) == (17, 84)


def test_the_order_of_lines_changes_no_number(shared_data, metrics, tmp_path):
    run = (
        shared_data / "runs/rank_llm/retrieve/SPLADE_P_P_ENSEMBLE_DISTIL.trec_results_covid.txt.gz"
    )
    qrels = ("--qrels", shared_data / "qrels" / "covid.txt", "--per_query")
    expected = metrics(run, *qrels)
    lines = gzip.decompress(run.read_bytes()).decode().splitlines()
    for seed in range(3):
        random.Random(seed).shuffle(lines)
        (tmp_path / "run").write_text("\r\n".join(lines))
        assert metrics(tmp_path / "run", *qrels) == expected
