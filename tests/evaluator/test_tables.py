import pytest

from tevatron.core.errors import ConfigError
from tevatron.evaluator.benchmarks import Benchmark, Dataset, Unit
from tevatron.evaluator.significance import ALPHA
from tevatron.evaluator.tables import AVERAGE, System, by_dataset, by_metric, compare


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


def values(metric, *numbers):
    return {metric: {f"q{n}": number for n, number in enumerate(numbers)}}


FIRST = System("BM25", {"m": 0.5}, values("m", *[0.4, 0.6] * 10))
BETTER = System("better", {"m": 0.6}, values("m", *[0.5, 0.7, 0.6, 0.6] * 5))
SAME = System("same", {"m": 0.5}, values("m", *[0.6, 0.4] * 10))


def test_systems_are_tested_against_the_first_stage():
    table = by_metric([FIRST, BETTER, SAME], ["m"], title="set", first_stage="BM25")
    first, better, same = (row.cells[0] for row in table.rows)
    assert (first.delta, first.tests, first.marks) == (None, None, "")
    assert better.delta == pytest.approx(0.1)
    assert better.tests.t_test < ALPHA
    assert better.marks == "*†"
    assert (same.marks, same.is_best, better.is_best) == ("", False, True)
    assert "Holm-corrected over this table's comparisons (2)" in table.notes[1]


def test_p_values_are_corrected_over_the_table():
    alone = by_metric([FIRST, BETTER], ["m"], first_stage="BM25").rows[1].cells[0].tests
    three = by_metric([FIRST, BETTER, SAME], ["m"], first_stage="BM25").rows[1].cells[0].tests
    assert three.t_test == pytest.approx(2 * alone.t_test)
    assert three.randomisation == pytest.approx(2 * alone.randomisation)


def test_without_values_of_queries_there_is_no_test():
    table = by_metric([System("a", {"m": 0.5}), BETTER], ["m"], first_stage="a")
    assert table.rows[1].cells[0].tests is None
    assert table.notes == ["beside a value: its change from a"]
    assert by_metric([System("a", {"m": 0.5})], ["m"]).notes == []


TWO_FORUMS = Benchmark(
    name="b",
    title="B",
    datasets=(Dataset(name="one"), Dataset(name="x"), Dataset(name="y"), Dataset(name="z")),
    units=(Unit("one", ("one",)), Unit("forums", ("x", "y")), Unit("z", ("z",))),
)


def test_a_benchmark_has_its_units_and_their_mean():
    first = {"one": FIRST, "x": System("", {"m": 0.1}), "y": System("", {"m": 0.3})}
    ours = {"one": BETTER, "x": System("", {"m": 0.2}), "y": System("", {"m": 0.3})}
    table = by_dataset(TWO_FORUMS, {"BM25": first, "ours": ours}, "m", first_stage="BM25")
    assert table.title == "B, m"
    assert [row.label for row in table.rows] == ["one", "forums", AVERAGE]
    numbers = [[cell.value for cell in row.cells] for row in table.rows]
    assert numbers == [
        [0.5, 0.6],
        [pytest.approx(0.2), pytest.approx(0.25)],
        [pytest.approx(0.35), pytest.approx(0.425)],
    ]
    assert [row.cells[1].marks for row in table.rows] == ["*†", "", ""]
    assert [row.cells[1].delta for row in table.rows] == pytest.approx([0.1, 0.05, 0.075])
    assert all(cell.is_partial for cell in table.rows[-1].cells)
    assert "partial: BM25 has no value of 1 of 4 data sets, such as z" in table.notes


def test_a_unit_with_a_part_missing_is_partial():
    sets = {"one": System("", {"m": 0.5}), "x": System("", {"m": 0.2}), "z": System("", {"m": 0.5})}
    table = by_dataset(TWO_FORUMS, {"ours": sets}, "m")
    assert [row.cells[0].is_partial for row in table.rows] == [False, True, False, True]
    assert table.rows[1].cells[0].value == 0.2
