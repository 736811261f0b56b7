import pytest

from tevatron.core.errors import ConfigError
from tevatron.evaluator.tables import System, compare, markdown


def test_columns_are_padded_and_aligned():
    assert markdown(["name", "x"], [["a", "1"], ["bcdef", "22"]]) == (
        "| name  |   x |\n| ----- | --: |\n| a     |   1 |\n| bcdef |  22 |\n"
    )


def test_best_is_bold_and_deltas_are_to_the_first_stage():
    table = compare(
        [
            System("BM25", {"ndcg@10": 0.5, "recall@10": 0.7}),
            System("untrained", {"ndcg@10": 0.25, "recall@10": 0.7}),
            System("trained", {"ndcg@10": 0.62346, "recall@10": 0.65}),
        ],
        ["ndcg@10", "recall@10"],
        first_stage="BM25",
    )
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] == [
        ["system", "ndcg@10", "recall@10"],
        ["---------", "-------------------:", "-------------------:"],
        ["BM25", "0.5000", "**0.7000**"],
        ["untrained", "0.2500 (-0.2500)", "**0.7000** (+0.0000)"],
        ["trained", "**0.6235** (+0.1235)", "0.6500 (-0.0500)"],
    ]


def test_metric_that_a_system_lacks_is_a_dash():
    table = compare([System("a", {"ndcg@10": 0.5}), System("b", {})], ["ndcg@10", "mrr@10"])
    assert [line.split("|")[2:4] for line in table.splitlines()[2:]] == [
        [" **0.5000** ", "      - "],
        ["          - ", "      - "],
    ]


def test_numbers_that_show_the_same_are_both_best():
    assert (
        compare([System("a", {"m": 0.50001}), System("b", {"m": 0.50002})], ["m"]).count(
            "**0.5000**"
        )
        == 2
    )


def test_pipes_and_newlines_in_names_do_not_break_the_table():
    assert "| a\\|b c " in compare([System("a|b\nc", {})], ["m"])


def test_unknown_first_stage_is_an_error():
    with pytest.raises(
        ConfigError, match=r"unknown system 'BM52'; there are: BM25\. Did you mean 'BM25'"
    ):
        compare([System("BM25", {})], ["m"], first_stage="BM52")
