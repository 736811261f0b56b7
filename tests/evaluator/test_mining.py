"""Hard negatives out of a run: what is taken, what is dropped as likely relevant, and what is said of the rest."""

import json

import pytest
from tests.support.commands import call

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.training import Passage, TrainingRow, read_training
from tevatron.evaluator import mining_command
from tevatron.evaluator.mining import Mined, MineOptions, candidate_rows, mine

CORPUS = {
    "p1": "tea is picked in spring",
    "p2": "leaves are picked by hand",
    "copy": "tea is picked in spring",
    "n1": "coffee beans are roasted",
    "n2": "milk comes from cows",
    "n3": "the picking of tea leaves in spring",
    "judged": "picked apples",
    "empty": "",
}
QRELS = {"q1": {"p1": 2, "p2": 1, "judged": 0}, "q2": {"n1": 1}, "q3": {"p1": 0}, "q4": {"p1": 1}}
QUERIES = {"q1": "when is tea picked", "q2": "roasted beans", "q3": "nothing", "q4": " "}
RUN = {
    "q1": {
        "n3": 9.0,
        "p1": 8.0,
        "copy": 7.5,
        "p2": 6.0,
        "judged": 5.5,
        "n1": 5.0,
        "empty": 4.0,
        "n2": 1.0,
    },
    "q2": {"n2": 2.0, "n3": 1.0},
    "q4": {"n1": 1.0},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set" / "qrels").mkdir(parents=True)
    for name, entries in (("corpus", CORPUS), ("queries", QUERIES)):
        lines = (json.dumps({"_id": key, "text": text}) + "\n" for key, text in entries.items())
        (tmp_path / "set" / f"{name}.jsonl").write_text("".join(lines))
    rows = [f"{q}\t{d}\t{g}\n" for q, grades in QRELS.items() for d, g in grades.items()]
    (tmp_path / "set" / "qrels" / "train.tsv").write_text("".join(rows))
    return BeirFolder(tmp_path / "set")


def candidates(folder, **options):
    report = Mined()
    rows = {
        row.query_id: row for row in candidate_rows(folder, RUN, MineOptions(**options), report)
    }
    return rows, report


def ids(passages):
    return [passage.docid for passage in passages]


def test_candidates_are_the_runs_best_that_are_neither_relevant_nor_a_copy(folder):
    rows, report = candidates(folder)
    assert ids(rows["q1"].positives) == ["p1", "p2"]
    assert ids(rows["q1"].negatives) == ["n3", "judged", "n1", "n2"]
    assert [passage.score for passage in rows["q1"].positives] == [8.0, 6.0]
    assert report.left_out == {
        "has no document that is judged relevant": ["q3"],
        "has no text in queries.jsonl": ["q4"],
    }


def test_depth_and_skip_bound_what_is_looked_at(folder):
    rows, _ = candidates(folder, depth=6, skip=1)
    assert ids(rows["q1"].negatives) == ["judged", "n1"]
    with pytest.raises(ConfigError, match="depth over skip, got 15, 5 and 5"):
        candidates(folder, depth=5, skip=5)


def mined(rows, **options):
    report = Mined()
    return {row.query_id: row for row in mine(rows, MineOptions(**options), report)}, report


def test_candidate_that_scores_like_a_positive_is_dropped(folder):
    rows, _ = candidates(folder)
    found, report = mined(rows.values())
    # p2 scores 6: n3 with 9 is likely relevant.
    assert ids(found["q1"].negatives) == ["judged", "n1", "n2"]
    assert report.num_too_good == 1
    # Its relevant document is not in the run: nothing is known to be below it.
    assert report.left_out == {"has no positive with a score to stay below": ["q2"]}
    assert (report.num_rows, report.num_positives, report.num_negatives) == (1, 2, 3)


@pytest.mark.parametrize(
    ("margin", "left"),
    [
        (0.5, ["judged", "n1", "n2"]),
        (0.6, ["n1", "n2"]),
        (1.5, ["n2"]),
        (-3, ["n3", "judged", "n1", "n2"]),
    ],
)
def test_margin_keeps_a_distance_from_the_lowest_positive(folder, margin, left):
    rows, _ = candidates(folder)
    assert ids(mined([rows["q1"]], margin=margin)[0]["q1"].negatives) == left


def test_hardest_negatives_come_first_and_are_kept(folder):
    passages = [Passage(f"text {n}", score=float(score)) for n, score in enumerate([1, 3, 2, 9, 3])]
    row = TrainingRow("q", "query", [Passage("yes", score=5.0)], passages)
    found, report = mined([row], num_negatives=3)
    assert [passage.text for passage in found["q"].negatives] == ["text 1", "text 4", "text 2"]
    assert report.num_too_good == 1
    none, report = mined([row], margin=10)
    assert none == {}
    assert report.left_out == {"has no candidate far enough below its positives": ["q"]}


def test_run_of_another_collection_is_refused(folder):
    with pytest.raises(
        InputError,
        match=r"1 of 1 documents of the run are not in the corpus of set, such as \['x'\]",
    ):
        list(candidate_rows(folder, {"q1": {"x": 1.0}}, MineOptions(), Mined()))
    with pytest.raises(InputError, match="no query of the run is judged in split 'train'"):
        list(candidate_rows(folder, {"q9": {"p1": 1.0}}, MineOptions(), Mined()))


def command(tmp_path, *arguments):
    (tmp_path / "run.txt").write_text(
        "".join(f"{q} {d} {s}\n" for q, scores in RUN.items() for d, s in scores.items())
    )
    done = call(
        mining_command.main,
        [
            *("--dataset", tmp_path / "set", "--ranklist", tmp_path / "run.txt"),
            *("--output_dir", tmp_path / "out", *arguments),
        ],
    )
    return done, list(read_training(tmp_path / "out" / "train.jsonl"))


def test_command_writes_training_data_and_says_what_is_left_out(folder, tmp_path):
    done, (row,) = command(tmp_path, "--negatives", "2")
    assert (row.query_id, ids(row.negatives)) == ("q1", ["judged", "n1"])
    assert (
        "1 queries, 2 positives, 2 negatives; 1 candidates dropped as likely relevant"
        in done.stdout
    )
    assert "1 queries left out, each has no positive with a score to stay below: q2" in done.stderr


def test_teachers_scores_decide_where_there_is_one(folder, tmp_path, start_scorer):
    scorer = start_scorer()
    done, rows = command(tmp_path, "--backends", scorer.url)
    found = {row.query_id: row for row in rows}
    # Words in common with the query, less a thousandth for each word: `picked apples` is above p2 now, n3 just below.
    assert [passage.score for passage in found["q1"].positives] == pytest.approx([2.995, 0.995])
    assert ids(found["q1"].negatives) == ["n3", "n1", "n2"]
    # The run lacks q2's positive, the teacher scores it all the same.
    assert [passage.score for passage in found["q2"].positives] == pytest.approx([1.996])
    assert all(row.has_teacher_scores for row in rows)
    assert "1 candidates dropped as likely relevant" in done.stdout
    again = start_scorer()
    assert command(tmp_path, "--backends", again.url)[1] == rows
    assert again.num_pairs == 0
