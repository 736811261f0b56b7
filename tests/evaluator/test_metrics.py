"""Literal answers of trec_eval 9.0.8 to minimal cases, and pytrec_eval's to made ones; published values: test_published."""

import json
import math
import random
import re

import numpy as np
import pytest
import pytrec_eval

from tevatron.core.contracts.jobs import METRIC_PATTERN
from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import read_ranklist
from tevatron.evaluator.metrics import (
    MAX_RELEVANCE,
    WITHOUT_CUTOFF,
    Metric,
    MetricName,
    cut,
    evaluate,
    parse_metric,
    rank,
    remove_identical,
)


def means(qrels, run, *names):
    return evaluate(qrels, run, [parse_metric(name) for name in names]).means


def mean(qrels, run, name):
    return means(qrels, run, name)[name]


def test_equal_scores_rank_by_docid_descending():
    qrels = {"q1": {"a": 0, "b": 1, "c": 0}}
    assert mean(qrels, {"q1": {"b": 1.0, "c": 1.0}}, "ndcg@10") == pytest.approx(0.63093, abs=1e-5)
    assert mean(qrels, {"q1": {"b": 1.0, "a": 1.0}}, "ndcg@10") == 1.0


def test_docids_are_compared_as_strings_not_numbers():
    assert rank({"10": 1.0, "9": 1.0, "2": 1.0}) == ["9", "2", "10"]
    assert mean({"q": {"9": 1}}, {"q": {"10": 1.0, "9": 1.0}}, "mrr@10") == 1.0


def test_scores_are_compared_in_float32():
    run = {"q1": {"d0": 0.50000001, "d9": 0.5}}
    assert mean({"q1": {"d0": 1}}, run, "ndcg@3") == pytest.approx(0.63093, abs=1e-5)
    assert rank({"a": 16777217.0, "b": 16777216.0}) == ["b", "a"]


def test_rank_orders_ids_beyond_the_basic_plane_as_their_utf8_bytes():
    assert rank({"\u00e9": 1.0, "\U0001f600": 1.0, "\uffff": 1.0}) == [
        "\U0001f600",
        "\uffff",
        "\u00e9",
    ]
    assert (
        mean(
            {"q": {"\u00e9": 1}}, {"q": {"\u00e9": 1.0, "\U0001f600": 1.0, "\uffff": 1.0}}, "mrr@3"
        )
        == 1 / 3
    )


def test_every_metric_uses_the_same_ranking_whatever_the_order_of_the_input():
    qrels = {"q": {f"d{i}": int(i % 3 == 0) for i in range(30)}}
    docids = [f"d{i}" for i in range(30)]
    names = ["ndcg@5", "recall@5", "map@5", "mrr@5", "precision@5"]
    found = []
    for seed in range(5):
        random.Random(seed).shuffle(docids)
        found.append(means(qrels, {"q": dict.fromkeys(docids, 1.0)}, *names))
    assert all(other == found[0] for other in found)
    # Descending: d9 d8 d7 d6 d5 -> d9 and d6 are relevant, of 10.
    assert found[0] == {
        "ndcg@5": pytest.approx(
            (1 + 1 / math.log2(5)) / sum(1 / math.log2(i + 2) for i in range(5))
        ),
        "recall@5": pytest.approx(0.2),
        "map@5": pytest.approx((1 + 2 / 4) / 10),
        "mrr@5": 1.0,
        "precision@5": pytest.approx(0.4),
    }


def test_query_missing_from_the_run_counts_zero_and_is_reported():
    found = evaluate(
        {"q1": {"a": 1}, "q2": {"b": 1}}, {"q1": {"a": 1.0}}, [Metric(MetricName.NDCG, 10)]
    )
    assert found.means == {"ndcg@10": 0.5}
    assert found.values == {"ndcg@10": {"q1": 1.0, "q2": 0.0}}
    assert found.missing_queries == ["q2"]
    assert (found.num_queries_qrels, found.num_queries_run) == (2, 1)


def test_query_with_an_empty_ranking_counts_as_missing():
    found = evaluate(
        {"q1": {"a": 1}, "q2": {"b": 1}}, {"q1": {"a": 1.0}, "q2": {}}, [Metric(MetricName.MRR, 10)]
    )
    assert (found.means, found.missing_queries) == ({"mrr@10": 0.5}, ["q2"])


def test_query_only_in_the_run_is_ignored_and_reported():
    found = evaluate(
        {"q1": {"a": 1}}, {"q1": {"a": 1.0}, "q9": {"z": 1.0}}, [Metric(MetricName.MAP, 10)]
    )
    assert (found.means, found.extra_queries) == ({"map@10": 1.0}, ["q9"])


def test_query_with_only_zero_grades_counts_zero():
    assert (
        mean({"q1": {"a": 1}, "q2": {"b": 0}}, {"q1": {"a": 1.0}, "q2": {"b": 1.0}}, "ndcg@10")
        == 0.5
    )


def test_query_without_any_judgment_changes_no_other_query():
    qrels = {"q1": {"a": 1}, "q2": {}, "q3": {"x": 1, "y": 1}}
    run = {"q1": {"a": 1.0}, "q2": {"b": 1.0}, "q3": {"n": 2.0, "x": 1.0, "y": 0.5}}
    found = evaluate(qrels, run, [Metric(MetricName.NDCG, 10)])
    assert found.values["ndcg@10"] == {"q1": 1.0, "q3": pytest.approx(0.69343, abs=1e-5)}
    assert found.unjudged_queries == ["q2"]


def test_negative_grades_are_judged_without_gain():
    qrels = {"q1": {"a": -1, "b": 1, "c": 2}}
    run = {"q1": {"a": 3.0, "b": 2.0, "c": 1.0}}
    found = means(qrels, run, "ndcg@10", "map@10", "mrr@10", "precision@1", "recall@10")
    assert found == {
        "ndcg@10": pytest.approx(0.6199, abs=5e-5),
        "map@10": pytest.approx(0.58333, abs=1e-5),
        "mrr@10": 0.5,
        "precision@1": 0.0,
        "recall@10": 1.0,
    }


def test_gain_is_linear():
    qrels = {"q1": {"a": 3, "b": 2, "c": 1}}
    assert mean(qrels, {"q1": {"c": 3.0, "b": 2.0, "a": 1.0}}, "ndcg@10") == pytest.approx(
        0.79, abs=5e-5
    )


def test_ideal_is_built_from_all_judged_documents():
    qrels = {"q1": {"a": 1, "b": 1, "c": 1, "d": 1}}
    run = {"q1": {"a": 1.0}}
    assert mean(qrels, run, "ndcg@10") == pytest.approx(0.3904, abs=5e-5)
    assert mean(qrels, run, "ndcg@3") == pytest.approx(0.4693, abs=5e-5)
    assert mean({"q": {"a": 1, "b": 1}}, {"q": {"a": 1.0}}, "ndcg@10") == pytest.approx(
        0.6131, abs=5e-5
    )


def test_recall_is_not_capped():
    qrels = {"q": {f"d{i}": 1 for i in range(20)}}
    assert mean(qrels, {"q": {f"d{i}": 1.0 for i in range(10)}}, "recall@10") == 0.5


def test_mrr_has_a_real_cut_off():
    run = {"q": {f"d{i:02}": -float(i) for i in range(1, 21)}}
    assert means({"q": {"d11": 1}}, run, "mrr@10", "mrr@11") == {"mrr@10": 0.0, "mrr@11": 1 / 11}
    for k in range(1, 21):
        assert mean({"q": {f"d{k:02}": 1}}, run, f"mrr@{k}") == 1 / k


def test_negative_and_infinite_scores_rank_right():
    run = {"q": {"a": -1.0, "b": -2.0, "c": -math.inf, "d": math.inf}}
    assert rank(run["q"]) == ["d", "a", "b", "c"]
    assert mean({"q": {"a": 1}}, run, "mrr@10") == 0.5


def test_document_with_its_querys_id_counts_unless_it_is_removed():
    run = {"d1": {"d1": 9.0, "d2": 5.0}}
    assert mean({"d1": {"d2": 1}}, run, "ndcg@10") == pytest.approx(0.63093, abs=1e-5)
    kept, removed = remove_identical(run)
    assert (mean({"d1": {"d2": 1}}, kept, "ndcg@10"), removed) == (1.0, 1)
    assert run == {"d1": {"d1": 9.0, "d2": 5.0}}


def test_ties_are_counted():
    run = {"q": {"a": 1.0, "b": 1.0, "c": 1.00000001, "d": 2.0}, "other": {"x": 0.0, "y": 0.0}}
    assert evaluate({"q": {"a": 1}}, run, [Metric(MetricName.NDCG, 10)]).num_tied == 3


def test_variant_says_what_was_computed():
    found = evaluate(
        {"q": {"a": 1}}, {"q": {"a": 1.0}}, [parse_metric("ndcg@10"), parse_metric("recall@100")]
    )
    assert found.variants["ndcg@10"].startswith("trec_eval ndcg_cut.10: linear gain")
    assert "not capped at 100" in found.variants["recall@100"]
    assert "-c" in found.variants["ndcg@10"]


def test_numpy_scores_and_grades_are_taken():
    found = mean(
        {"q": {"a": np.int64(1)}}, {"q": {"a": np.float32(0.5), "b": np.float64(0.7)}}, "mrr@10"
    )
    assert found == 0.5


@pytest.mark.parametrize("grade", [1.0, 0.9, "1", True, None])
def test_grade_that_is_no_integer_is_refused(grade):
    with pytest.raises(InputError, match=r"query 'q', document 'a' must be an integer, got"):
        evaluate({"q": {"a": grade}}, {"q": {"a": 1.0}}, [Metric(MetricName.NDCG, 10)])


@pytest.mark.parametrize("grade", [MAX_RELEVANCE + 1, 2**32 + 1, 10**30, -(2**40)])
def test_grade_that_trec_eval_would_wrap_is_refused(grade):
    with pytest.raises(InputError, match="within 1000000 of 0"):
        evaluate({"q": {"a": grade}}, {"q": {"a": 1.0}}, [Metric(MetricName.NDCG, 10)])


@pytest.mark.parametrize("score", ["0.5", None, True])
def test_score_that_is_no_number_is_refused(score):
    with pytest.raises(InputError, match=r"score of query 'q', document 'a' must be a number"):
        evaluate({"q": {"a": 1}}, {"q": {"a": score}}, [Metric(MetricName.NDCG, 10)])


def test_nan_is_refused_with_its_place():
    with pytest.raises(InputError, match="score of query 'q', document 'b' is NaN"):
        evaluate({"q": {"a": 1}}, {"q": {"a": 1.0, "b": math.nan}}, [Metric(MetricName.NDCG, 10)])


@pytest.mark.parametrize("docid", ["a\0b", "a\ud800"])
def test_id_that_trec_eval_cannot_hold_is_refused(docid):
    with pytest.raises(InputError, match="must be UTF-8 text without NUL"):
        evaluate({"q": {"a": 1}}, {"q": {docid: 1.0}}, [Metric(MetricName.NDCG, 10)])


def test_hash_and_blank_in_a_docid_are_kept():
    qrels = {"q": {"msmarco_v2.1_doc_0#1": 1, "a b": 1}}
    assert mean(qrels, {"q": {"msmarco_v2.1_doc_0#1": 2.0, "a b": 1.0}}, "ndcg@10") == 1.0


def test_no_common_query_says_so_with_examples():
    with pytest.raises(
        InputError, match=r"2 queries such as 'q1', 'q2', the run has 1 such as 'q1\.0'"
    ):
        evaluate(
            {"q1": {"a": 1}, "q2": {"a": 1}}, {"q1.0": {"a": 1.0}}, [Metric(MetricName.NDCG, 10)]
        )


def test_empty_qrels_and_no_metric_are_refused():
    with pytest.raises(InputError, match="no judgment"):
        evaluate({"q": {}}, {"q": {"a": 1.0}}, [Metric(MetricName.NDCG, 10)])
    with pytest.raises(ConfigError, match="no metric"):
        evaluate({"q": {"a": 1}}, {"q": {"a": 1.0}}, [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ndgc@10", "Did you mean 'ndcg'"),
        ("ndcg", "of the form name@k"),
        ("ndcg@0", "between 1 and"),
        ("ndcg@-1", "of the form name@k"),
        ("mrr@99999999", "between 1 and"),
        ("rprec@10", "metric 'rprec' has no cut-off"),
        ("recall_cap@10", "unknown metric 'recall_cap'"),
    ],
)
def test_metric_that_cannot_be_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_metric(text)


def test_metric_names_are_read_in_either_case():
    assert parse_metric("NDCG@10") == Metric(MetricName.NDCG, 10)
    assert str(parse_metric("MRR@5")) == "mrr@5"


def test_cut_keeps_the_best_first():
    assert cut({"q": {"a": 1.0, "b": 3.0, "c": 3.0}}, depth=2) == {"q": {"c": 3.0, "b": 3.0}}
    assert list(cut({"q": {"a": 1.0, "b": 3.0, "c": 3.0}}, depth=2)["q"]) == ["c", "b"]


def test_success_is_1_where_something_relevant_is_in_the_first_k():
    run = {"q": {"x": 3.0, "a": 2.0}, "p": {"y": 1.0}}
    found = evaluate(
        {"q": {"a": 1}, "p": {"a": 1}}, run, [parse_metric("success@1"), parse_metric("success@2")]
    )
    assert found.means == {"success@1": 0.0, "success@2": 0.5}


def test_r_precision_cuts_at_as_many_as_are_relevant():
    qrels = {"q": {"a": 1, "b": 2, "c": 1, "d": 0}}
    found = evaluate(
        qrels, {"q": {"a": 4.0, "d": 3.0, "b": 2.0, "c": 1.0}}, [parse_metric("rprec")]
    )
    assert found.means == {"rprec": pytest.approx(2 / 3)}
    assert found.variants["rprec"].startswith("trec_eval Rprec")


def test_capped_recall_divides_by_what_fits_into_the_cut_off():
    qrels = {"q": {f"d{i:02}": 1 for i in range(20)}}
    run = {"q": {f"d{i:02}": -float(i) for i in range(5, 25)}}
    assert means(qrels, run, "capped_recall@10", "recall@10", "capped_recall@100") == {
        "capped_recall@10": 1.0,
        "recall@10": 0.5,
        "capped_recall@100": 0.75,
    }
    assert mean({"q": {"a": 0}, "p": {"a": 1}}, {"p": {"a": 1.0}}, "capped_recall@3") == 0.5


def test_judged_is_the_share_of_the_first_k_with_any_grade():
    qrels = {"q": {"a": 1, "b": 0, "c": -1}, "missing": {"a": 1}}
    run = {"q": {"a": 5.0, "x": 4.0, "b": 3.0, "c": 2.0, "y": 1.0}}
    found = evaluate(qrels, run, [parse_metric(f"judged@{k}") for k in (1, 2, 4, 100)])
    assert {name: values["q"] for name, values in found.values.items()} == {
        "judged@1": 1.0,
        "judged@2": 0.5,
        "judged@4": 0.75,
        "judged@100": 0.6,
    }
    assert found.means["judged@1"] == 0.5


def test_relevance_level_touches_binary_metrics_and_not_ndcg():
    qrels = {"q": {"a": 1, "b": 2, "c": 3}}
    run = {"q": {"a": 3.0, "b": 2.0}}
    names = ["ndcg@10", "mrr@10", "recall@10", "capped_recall@1", "success@1", "rprec", "judged@3"]
    metrics = [parse_metric(name) for name in names]
    one = evaluate(qrels, run, metrics)
    two = evaluate(qrels, run, metrics, relevance_level=2)
    assert one.means["ndcg@10"] == two.means["ndcg@10"]
    assert one.means["judged@3"] == two.means["judged@3"] == 1.0
    assert [two.means[name] for name in names[1:6]] == [0.5, 0.5, 0.0, 0.0, 0.5]
    assert [one.means[name] for name in names[1:6]] == [1.0, pytest.approx(2 / 3), 1.0, 1.0, 2 / 3]
    assert "relevant is grade 2 or higher" in two.variants["recall@10"]
    assert "grade" not in two.variants["ndcg@10"].replace("linear gain", "")
    with pytest.raises(ConfigError, match="level must be 1 or more, got 0"):
        evaluate(qrels, run, metrics, relevance_level=0)


@pytest.mark.parametrize("level", [1, 2])
def test_random_runs_are_as_pytrec_eval_has_them(level):
    rng = random.Random(level)
    docids = [f"d{n}" for n in range(60)]
    qrels = {
        f"q{n}": {docid: rng.choice([-1, 0, 0, 1, 1, 2, 3]) for docid in rng.sample(docids, 30)}
        for n in range(40)
    }
    run = {
        qid: {docid: rng.choice([0.5, 1.0, rng.random()]) for docid in rng.sample(docids, 25)}
        for qid in qrels
    }
    names = {
        "ndcg_cut": "ndcg",
        "map_cut": "map",
        "recall": "recall",
        "P": "precision",
        "success": "success",
    }
    measures = {f"{name}.1,5,20" for name in names} | {"Rprec", "recip_rank"}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, measures, relevance_level=level).evaluate(run)
    metrics = [parse_metric(f"{name}@{k}") for name in names.values() for k in (1, 5, 20)]
    ours = evaluate(
        qrels,
        run,
        [*metrics, parse_metric("rprec"), parse_metric("mrr@1000")],
        relevance_level=level,
    ).values
    for qid, values in theirs.items():
        assert ours["rprec"][qid] == values["Rprec"]
        assert ours["mrr@1000"][qid] == values["recip_rank"]
        for theirs_name, name in names.items():
            for k in (1, 5, 20):
                assert ours[f"{name}@{k}"][qid] == values[f"{theirs_name}_{k}"]


# Published oracles


def test_tie_rule_shows_on_a_real_run(shared_data):
    covid = read_qrels(shared_data / "qrels" / "covid.txt")
    folder = shared_data / "runs" / "rank_llm" / "retrieve"
    run = read_ranklist(folder / "SPLADE_P_P_ENSEMBLE_DISTIL.trec_results_covid.txt.gz")
    # File order would give .72816.
    assert mean(covid, run, "ndcg@10") == pytest.approx(0.72744, abs=5e-6)


def test_runs_over_whole_collections_have_trec_evals_values(shared_data):
    names = {
        "ndcg_cut_1": "ndcg@1",
        "ndcg_cut_5": "ndcg@5",
        "ndcg_cut_10": "ndcg@10",
        "recall_100": "recall@100",
        "map_cut_100": "map@100",
        "recip_rank": "mrr@1000",
    }
    expected = json.loads((shared_data / "oracle" / "own_runs_scores.json").read_text())
    assert len(expected) == 4
    for name, values in expected.items():
        qrels = BeirFolder(shared_data / name.partition("/")[0]).qrels("test")
        run = read_ranklist(shared_data / name)
        if name.startswith("noveleval"):
            # Its values are over each query's own 20 candidates; over the whole file nDCG@10 is .7309, by hand too.
            assert mean(qrels, run, "ndcg@10") == pytest.approx(0.7308889557204954, abs=1e-12)
            run = {
                qid: {docid: score for docid, score in run[qid].items() if docid in qrels[qid]}
                for qid in run
            }
        found = means(qrels, run, *names.values())
        assert {measure: round(found[metric], 4) for measure, metric in names.items()} == values, (
            name
        )


def test_every_metric_may_be_asked_of_a_job_and_no_other():
    for name in MetricName:
        text = name.value if name in WITHOUT_CUTOFF else f"{name.value}@10"
        assert re.search(METRIC_PATTERN, text)
        assert str(parse_metric(text)) == text
    assert not re.search(METRIC_PATTERN, "rprec@10")
    assert not re.search(METRIC_PATTERN, "bpref@10")
