import gzip
import json

import pytest

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.training import read_training
from tevatron.evaluator.prepare import PrepareOptions, choose, prepare

DOCUMENTS = {f"d{i:02}": ("", f"word{i} tea number {i}") for i in range(20)}


def write_beir(folder, *, queries, documents=DOCUMENTS, **splits):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": d, "title": t, "text": x}) + "\n" for d, (t, x) in documents.items()
        )
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": q, "text": t}) + "\n" for q, t in queries.items())
    )
    for split, qrels in splits.items():
        lines = [f"{q}\t{d}\t{g}\n" for q, grades in qrels.items() for d, g in grades.items()]
        (folder / "qrels" / f"{split}.tsv").write_text(
            "query-id\tcorpus-id\tscore\n" + "".join(lines)
        )
    return BeirFolder(folder)


def rows_of(folder):
    return {row.query_id: row for row in read_training(folder / "train.jsonl")}


QUERIES = {f"q{i}": f"word{i} tea" for i in range(10)}
QRELS = {f"q{i}": {f"d{i:02}": 1, f"d{i + 10:02}": 0} for i in range(10)}


def test_without_train_judgments_queries_are_held_out_by_hash_and_the_rest_trains(tmp_path):
    dataset = write_beir(tmp_path / "in", queries=QUERIES, test=QRELS)
    made = prepare(dataset, tmp_path / "out", PrepareOptions(num_queries=3, num_negatives=4))
    heldout = BeirFolder(tmp_path / "out" / "heldout")
    chosen = set(heldout.qrels("test"))
    assert chosen == set(choose(QUERIES, 3))
    assert heldout.qrels("test") == {qid: QRELS[qid] for qid in chosen}
    assert heldout.queries().keys() == chosen
    assert list(heldout.corpus()) == list(dataset.corpus())
    rows = rows_of(tmp_path / "out")
    assert rows.keys() == QUERIES.keys() - chosen
    assert (made.num_rows, made.num_positives, made.num_negatives, made.num_heldout) == (
        7,
        7,
        28,
        3,
    )
    row = rows[min(rows)]
    number = int(row.query_id[1:])
    assert [passage.docid for passage in row.positives] == [f"d{number:02}"]
    # Judged not relevant first.
    assert row.negatives[0].docid == f"d{number + 10:02}"
    assert f"d{number:02}" not in {passage.docid for passage in row.negatives}
    assert len({passage.docid for passage in row.negatives}) == 4


def test_choice_is_stable_and_grows_with_the_count():
    ids = [f"q{i}" for i in range(100)]
    assert choose(ids, 5) == choose(reversed(ids), 5) == choose(ids, 50)[:5]
    assert choose(ids, 3) == ["q60", "q86", "q88"]  # `printf q60 | sha256sum` begins with 00


def test_with_train_judgments_all_test_queries_are_held_out(tmp_path):
    dataset = write_beir(
        tmp_path / "in",
        queries=QUERIES,
        train={q: QRELS[q] for q in ("q0", "q1", "q2")},
        test={q: QRELS[q] for q in ("q5", "q6")},
    )
    made = prepare(dataset, tmp_path / "out", PrepareOptions())
    assert rows_of(tmp_path / "out").keys() == {"q0", "q1", "q2"}
    assert BeirFolder(tmp_path / "out" / "heldout").qrels("test").keys() == {"q5", "q6"}
    assert made.left_out == {}
    prepare(dataset, tmp_path / "out", PrepareOptions(num_queries=1))
    assert len(BeirFolder(tmp_path / "out" / "heldout").qrels("test")) == 1
    assert rows_of(tmp_path / "out").keys() == {"q0", "q1", "q2"}


def test_query_that_is_in_both_splits_does_not_train(tmp_path):
    dataset = write_beir(
        tmp_path / "in",
        queries=QUERIES,
        train={q: QRELS[q] for q in ("q0", "q1")},
        test={"q1": QRELS["q1"]},
    )
    made = prepare(dataset, tmp_path / "out", PrepareOptions())
    assert rows_of(tmp_path / "out").keys() == {"q0"}
    assert made.left_out == {"is a test query too": ["q1"]}


def test_same_input_gives_the_same_file_and_the_seed_changes_the_draw_only(tmp_path):
    dataset = write_beir(tmp_path / "in", queries=QUERIES, test=QRELS)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(dataset, tmp_path / name, PrepareOptions(num_queries=3, num_negatives=4, seed=seed))
    texts = [(tmp_path / name / "train.jsonl").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    qrels = [(tmp_path / name / "heldout" / "qrels" / "test.tsv").read_bytes() for name in "ac"]
    assert qrels[0] == qrels[1]


def test_queries_that_cannot_be_used_are_reported(tmp_path):
    queries = QUERIES | {"empty": " ", "zeros": "word1"}
    train = {
        "q0": {"d00": 1},
        "empty": {"d01": 1},
        "zeros": {"d01": 0},
        "lost": {"d01": 1},
        "q3": {"gone": 1},
        "q4": {"blank": 2},
    }
    dataset = write_beir(
        tmp_path / "in",
        queries=queries,
        documents=DOCUMENTS | {"blank": (" ", "")},
        train=train,
        test={"q9": {"d09": 1}},
    )
    made = prepare(dataset, tmp_path / "out", PrepareOptions())
    assert rows_of(tmp_path / "out").keys() == {"q0"}
    assert made.left_out == {
        "has an empty text": ["empty"],
        "has no document that is judged relevant": ["zeros"],
        "has no text in queries.jsonl": ["lost"],
        "has no relevant document with words in the corpus": ["q3", "q4"],
    }


def test_best_grade_comes_first_and_negative_grades_are_negatives(tmp_path):
    dataset = write_beir(
        tmp_path / "in",
        queries=QUERIES,
        train={"q0": {"d03": 1, "d05": 3, "d04": 2, "d06": -1, "d07": 0}},
        test={"q9": {"d09": 1}},
    )
    prepare(dataset, tmp_path / "out", PrepareOptions(num_negatives=3))
    row = rows_of(tmp_path / "out")["q0"]
    assert [passage.docid for passage in row.positives] == ["d05", "d04", "d03"]
    assert [passage.docid for passage in row.negatives][:2] == ["d06", "d07"]


def test_copy_of_a_relevant_document_is_no_negative(tmp_path):
    documents = {"a": ("", "green tea"), "b": ("", "green tea"), "c": ("", "black tea")}
    dataset = write_beir(
        tmp_path / "in",
        queries=QUERIES | {"q": "green tea"},
        documents=documents,
        train={"q": {"a": 1}},
        test={"q1": {"c": 1}},
    )
    prepare(dataset, tmp_path / "out", PrepareOptions())
    assert [passage.docid for passage in rows_of(tmp_path / "out")["q"].negatives] == ["c"]


def test_query_without_negatives_is_left_out(tmp_path):
    documents = {"a": ("", "green"), "b": ("", "black tea")}
    dataset = write_beir(
        tmp_path / "in",
        queries={"q": "green", "p": "tea black"},
        documents=documents,
        train={"q": {"a": 1}, "p": {"a": 1}},
        test={"q": {"a": 1}},
    )
    made = prepare(dataset, tmp_path / "out", PrepareOptions(train_split="train"))
    assert rows_of(tmp_path / "out").keys() == {"p"}
    assert made.left_out["is a test query too"] == ["q"]
    with pytest.raises(InputError, match="no query is left to train on: 1 has no negative"):
        prepare(
            write_beir(
                tmp_path / "in2",
                queries={"q": "green", "p": "tea"},
                documents=documents,
                train={"q": {"a": 1}},
                test={"p": {"b": 1}},
            ),
            tmp_path / "out2",
            PrepareOptions(),
        )
    assert not (tmp_path / "out2" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            PrepareOptions(),
            "no judgments of a split 'train': say with --queries how many of its 10",
        ),
        (PrepareOptions(num_queries=10), "fewer than all"),
        (PrepareOptions(num_queries=11), "between 1 and the 10 usable test queries, got 11"),
        (PrepareOptions(num_queries=0), "between 1 and the 10 usable test queries, got 0"),
        (PrepareOptions(num_queries=3, num_negatives=0), "must be 1 or more, got 0"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, says):
    dataset = write_beir(tmp_path / "in", queries=QUERIES, test=QRELS)
    with pytest.raises(ConfigError, match=says):
        prepare(dataset, tmp_path / "out", options)


def test_compressed_corpus_stays_compressed(tmp_path):
    dataset = write_beir(tmp_path / "in", queries=QUERIES, test=QRELS)
    data = dataset.corpus_path.read_bytes()
    dataset.corpus_path.unlink()
    dataset.corpus_path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(data))
    prepare(BeirFolder(tmp_path / "in"), tmp_path / "out", PrepareOptions(num_queries=3))
    heldout = BeirFolder(tmp_path / "out" / "heldout")
    assert heldout.corpus_path.name == "corpus.jsonl.gz"
    assert len(list(heldout.corpus())) == 20


def test_scifact_trains_on_what_is_not_held_out(shared_data, tmp_path):
    made = prepare(
        BeirFolder(shared_data / "scifact"), tmp_path / "out", PrepareOptions(num_queries=30)
    )
    assert (made.num_rows, made.num_heldout, made.left_out) == (270, 30, {})
    assert made.num_negatives == 270 * 15
