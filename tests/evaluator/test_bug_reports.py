"""Public reports of wrong numbers in other evaluators, each with its right value; addresses are below https://github.com/.

What concerns retrieval, annotation, sweeps and scorers has its tests there.
"""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from tevatron.core.errors import FormatError, InputError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import read_ranklist, write_ranklist
from tevatron.evaluator.benchmarks import get_benchmark, prepare_run
from tevatron.evaluator.metrics import cut, evaluate, parse_metric, rank
from tevatron.evaluator.overlap import check_overlap

ROOT = Path(__file__).parents[2]


def means(qrels, run, *names, level=1):
    metrics = [parse_metric(name) for name in names]
    return list(evaluate(qrels, run, metrics, relevance_level=level).means.values())


def mean(qrels, run, name, *, level=1):
    return means(qrels, run, name, level=level)[0]


def read(reader, tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    return reader(path)


def test_01_ties_go_by_docid_and_not_by_rank():
    """usnistgov/trec_eval/issues/22"""
    assert mean({"q": {"b": 1}}, {"q": {"b": 1.0, "c": 1.0}}, "ndcg@10") == pytest.approx(
        1 / math.log2(3)
    )
    assert mean({"q": {"b": 1}}, {"q": {"b": 1.0, "a": 1.0}}, "ndcg@10") == 1.0


def test_02_scores_closer_than_float32_are_equal_and_the_variant_says_so():
    """usnistgov/trec_eval/issues/34"""
    found = evaluate(
        {"q": {"d0": 1}}, {"q": {"d0": 0.50000001, "d9": 0.5}}, [parse_metric("ndcg@10")]
    )
    assert found.means["ndcg@10"] == pytest.approx(0.6309, abs=5e-5)
    assert "float32" in found.variants["ndcg@10"]


def test_03_missing_queries_stay_in_the_mean():
    """usnistgov/trec_eval/issues/18, cvangysel/pytrec_eval/issues/30"""
    assert mean({"q1": {"a": 1}, "q2": {"b": 1}}, {"q1": {"a": 1.0}}, "ndcg@10") == 0.5


def test_04_a_query_without_judgments_spoils_no_other():
    """cvangysel/pytrec_eval/issues/49"""
    qrels = {"q1": {"a": 1}, "q2": {}, "q3": {"x": 1, "y": 1}}
    run = {"q1": {"a": 1.0}, "q2": {"b": 1.0}, "q3": {"n": 2.0, "x": 1.0, "y": 0.5}}
    values = evaluate(qrels, run, [parse_metric("ndcg@10")]).values["ndcg@10"]
    assert values["q3"] == pytest.approx(0.69343, abs=5e-6)


def test_05_numpy_numbers_are_taken_and_fractions_refused():
    """cvangysel/pytrec_eval/issues/6, cvangysel/pytrec_eval/issues/16"""
    run = {"q": {"a": np.float32(0.5), "b": np.float64(0.25)}}
    assert mean({"q": {"a": np.int64(1), "b": np.int32(0)}}, run, "mrr@10") == 1.0
    with pytest.raises(InputError, match=r"must be an integer, got 1\.5"):
        mean({"q": {"a": 1.5}}, run, "mrr@10")


def test_06_a_fraction_as_grade_is_refused_with_its_line(tmp_path):
    """usnistgov/trec_eval/issues/49"""
    with pytest.raises(FormatError, match=r"file:2: .*expected a whole number, got '0\.9'"):
        read(read_qrels, tmp_path, "q 0 a 1\nq 0 b 0.9\n")


def test_07_a_document_given_twice_names_query_and_document(tmp_path):
    """cvangysel/pytrec_eval/issues/50, castorini/anserini/issues/476, deepset-ai/haystack/pull/11959"""
    with pytest.raises(FormatError, match=r"file:2: .*document 'a' is given twice for query 'q'"):
        read(read_ranklist, tmp_path, "q Q0 a 1 3 r\nq Q0 a 2 2 r\n")
    with pytest.raises(FormatError, match="document 'a' of query 'q' has two grades, 1 and 0"):
        read(read_qrels, tmp_path, "q 0 a 1\nq 0 a 0\n")


def test_08_queries_that_never_meet_are_an_error_and_a_hash_is_part_of_an_id(tmp_path):
    """usnistgov/trec_eval/issues/46"""
    with pytest.raises(InputError, match=r"'q1', the run has 1 such as 'q1\.0'"):
        check_overlap({"q1": {"a": 1}}, {"q1.0": {"a": 1.0}})
    docid = "msmarco_v2.1_doc_0#1"
    run = read(read_ranklist, tmp_path, f"q Q0 {docid} 1 2 r\nq Q0 msmarco_v2.1_doc_0 2 1 r\n")
    assert mean({"q": {docid: 1}}, run, "mrr@10") == 1.0


def test_09_negative_grades_are_judged_and_gain_nothing():
    """usnistgov/trec_eval/issues/29"""
    qrels, run = {"q": {"a": -1, "b": 1}}, {"q": {"a": 2.0, "b": 1.0}}
    assert means(qrels, run, "mrr@10", "judged@2", "ndcg@10") == [
        0.5,
        1.0,
        pytest.approx(1 / math.log2(3)),
    ]


def test_10_a_perfect_run_is_perfect_where_queries_and_documents_share_ids():
    """beir-cellar/beir/issues/187"""
    qrels = {str(n): {str(n): 1} for n in range(10)}
    run = {qid: dict.fromkeys(grades, 1.0) for qid, grades in qrels.items()}
    kept, dropped = prepare_run(get_benchmark("beir15").dataset("scifact"), run)
    assert (mean(qrels, kept, "ndcg@10"), dropped) == (1.0, 0)


def test_11_arguanas_own_arguments_are_dropped_and_counted():
    """beir-cellar/beir/pull/91, lightonai/pylate/issues/198, thakur-nandan/sprint/issues/2"""
    qrels, run = {"d1": {"d2": 1}}, {"d1": {"d1": 9.0, "d2": 5.0}}
    assert mean(qrels, run, "ndcg@10") == pytest.approx(0.6309, abs=5e-5)
    kept, dropped = prepare_run(get_benchmark("beir15").dataset("arguana"), run)
    assert (mean(qrels, kept, "ndcg@10"), dropped) == (1.0, 1)
    assert run == {"d1": {"d1": 9.0, "d2": 5.0}}


def test_12_msmarco_is_dev_and_touche_version_2():
    """beir-cellar/beir/issues/95, beir-cellar/beir/issues/74"""
    beir = get_benchmark("beir15")
    assert (beir.dataset("msmarco").split, beir.dataset("msmarco").num_queries) == ("dev", 6980)
    assert beir.dataset("webis-touche2020").num_relevant == 932


def test_14_one_ranking_for_all_metrics_whatever_the_order_of_lines(tmp_path):
    """beir-cellar/beir/issues/105, embeddings-benchmark/mteb/issues/5092 and pull/5136, 5241, 5376"""
    names = ["mrr@10", "ndcg@10", "map@10", "recall@1"]
    lines = [f"q\td{n}\t1.0" for n in range(9)]
    found = set()
    for seed in range(5):
        random.Random(seed).shuffle(lines)
        run = read(read_ranklist, tmp_path, "\n".join(lines))
        found.add(tuple(means({"q": {"d0": 1}}, run, *names)))
    (only,) = found
    assert only == (1 / 9, pytest.approx(1 / math.log2(10)), 1 / 9, 0.0)


def test_15_ties_that_low_precision_made_are_counted():
    """embeddings-benchmark/mteb/issues/4932, huggingface/sentence-transformers/pull/3893"""
    saturated = {f"d{n}": 1 / (1 + math.exp(-float(np.float16(n)))) for n in range(12, 30)}
    scores = {docid: float(np.float16(score)) for docid, score in saturated.items()}
    assert evaluate({"q": {"d29": 1}}, {"q": scores}, [parse_metric("map@10")]).num_tied == 18
    assert (
        evaluate(
            {"q": {"d29": 1}}, {"q": {"a": 18.0, "b": 20.0}}, [parse_metric("map@10")]
        ).num_tied
        == 0
    )


def test_17_what_the_first_stage_missed_stays_in_the_ideal():
    """huggingface/sentence-transformers/pull/4054"""
    assert mean({"q": {"a": 1, "b": 1}}, {"q": {"a": 1.0}}, "ndcg@10") == pytest.approx(
        0.6131, abs=5e-5
    )


def test_18_the_ideal_is_that_of_all_judgments():
    """spiceai/spiceai/issues/12277"""
    qrels = {"q": dict.fromkeys("abcd", 1)}
    assert mean(qrels, {"q": {"a": 1.0}}, "ndcg@10") == pytest.approx(0.3904, abs=5e-5)


def test_19_20_the_relevance_level_is_not_ndcgs(shared_data):
    """castorini/anserini/issues/1525, ielab/llm-rankers/issues/4"""
    qrels = read_qrels(shared_data / "qrels" / "qrels.dl19-passage.txt")
    folder = shared_data / "runs" / "rank_llm" / "rerank"
    run = read_ranklist(folder / "BM25.rankvicuna7b.top100.dl19.txt.gz")
    names = ("map@100", "recall@100", "ndcg@10")
    assert [round(value, 4) for value in means(qrels, run, *names)] == [0.3617, 0.4531, 0.6682]
    assert [round(value, 4) for value in means(qrels, run, *names, level=2)] == [
        0.3316,
        0.4910,
        0.6682,
    ]


def test_20_scores_below_zero_rank_right():
    """ielab/llm-rankers/issues/4"""
    assert rank({"a": -2.0, "b": -1.0, "c": -10.0}) == ["b", "a", "c"]


def test_23_the_mean_is_over_the_judged_queries():
    """AmenRa/ranx/issues/27, joaopalotti/trectools/issues/24"""
    found = evaluate(
        {"q1": {"a": 1}, "q2": {"b": 1}},
        {"q2": {"b": 1.0}, "q3": {"c": 1.0}},
        [parse_metric("map@10")],
    )
    assert (found.means["map@10"], found.missing_queries, found.extra_queries) == (
        0.5,
        ["q1"],
        ["q3"],
    )


def test_24_recall_is_not_capped_unless_it_says_so(shared_data):
    """castorini/pyserini/issues/1527, beir-cellar/beir/issues/4"""
    qrels = read_qrels(shared_data / "qrels" / "covid.txt")
    folder = shared_data / "runs" / "rank_llm" / "retrieve"
    run = read_ranklist(folder / "BM25.trec_results_covid.txt.gz")
    found = evaluate(qrels, run, [parse_metric("recall@100"), parse_metric("capped_recall@100")])
    assert round(found.means["recall@100"], 4) == 0.1091
    assert found.means["capped_recall@100"] > 4 * found.means["recall@100"]
    assert "not capped" in found.variants["recall@100"]
    assert "BEIR's R_cap" in found.variants["capped_recall@100"]


def test_25_reciprocal_rank_has_a_cut_off():
    """castorini/anserini/issues/1790, usnistgov/trec_eval/issues/31"""
    run = {"q": {f"d{n:02}": -float(n) for n in range(1, 12)}}
    assert means({"q": {"d11": 1}}, run, "mrr@10", "mrr@11") == [0.0, 1 / 11]


def test_26_gain_is_linear_and_says_so():
    """castorini/anserini/issues/92, Georgetown-IR-Lab/OpenNIR/issues/14"""
    found = evaluate(
        {"q": {"a": 3, "b": 2, "c": 1}},
        {"q": {"c": 3.0, "b": 2.0, "a": 1.0}},
        [parse_metric("ndcg@10")],
    )
    assert found.means["ndcg@10"] == pytest.approx(0.7900, abs=5e-5)  # .6806 with 2^grade - 1
    assert "linear gain" in found.variants["ndcg@10"]


def test_27_a_run_that_is_cut_keeps_its_ideal():
    """cvangysel/pytrec_eval/issues/40"""
    qrels, run = {"q": {"a": 1, "b": 1}}, {"q": {"a": 3.0, "x": 2.0, "b": 1.0}}
    short = cut(run, depth=2)
    assert mean(qrels, short, "ndcg@1000") == pytest.approx(0.6131, abs=5e-5)
    assert mean(qrels, run, "ndcg@1") == 1.0


def test_28_the_build_needs_no_network():
    """cvangysel/pytrec_eval/issues/47, 48, 54"""
    text = (ROOT / "services" / "evaluator" / "pyproject.toml").read_text()
    assert "pytrec-eval-terrier" in text
    assert '"pytrec_eval' not in text
    assert '"pytrec-eval=' not in text


def test_29_ranks_are_written_from_1_and_not_read(tmp_path):
    """beir-cellar/beir/issues/212"""
    write_ranklist(tmp_path / "run", {"q": {"a": 1.0, "b": 2.0}}, trec=True)
    assert [line.split()[2:4] for line in (tmp_path / "run").read_text().splitlines()] == [
        ["b", "1"],
        ["a", "2"],
    ]
    assert read(read_ranklist, tmp_path, "q Q0 a 0 1 x\nq Q0 b 0 2 x\n") == {
        "q": {"a": 1.0, "b": 2.0}
    }


def test_31_padded_document_ids_are_named():
    """embeddings-benchmark/mteb/issues/5170"""
    with pytest.raises(InputError, match="would meet without leading zeros"):
        check_overlap({"q": {"12": 1}}, {"q": {"00012": 1.0}})


def test_32_a_folder_gives_one_split_after_another(tmp_path):
    """beir-cellar/beir/issues/99"""
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "d", "text": "x"}))
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "q", "text": "x"}\n{"_id": "p", "text": "y"}\n'
    )
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\np\td\t1\n")
    folder = BeirFolder(tmp_path)
    assert (folder.qrels("test"), folder.qrels("train")) == ({"q": {"d": 1}}, {"p": {"d": 1}})
    assert folder.queries() == {"q": "x", "p": "y"}


def test_33_the_toolkits_own_three_columns_are_read(tmp_path):
    """texttron/tevatron examples/rankllama/prepare_rerank_file.py"""
    assert read(read_ranklist, tmp_path, "q\td\t1.5\n") == {"q": {"d": 1.5}}
