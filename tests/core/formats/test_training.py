import json

import pytest

from tevatron.core.errors import FormatError
from tevatron.core.formats.training import Passage, TrainingRow, read_training

GOOD = {"query": "q", "positive_passages": [{"text": "p"}]}


def _read(tmp_path, *rows):
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return list(read_training(path))


def test_a_full_row(tmp_path):
    row = {
        "query_id": "q1",
        "query": "what",
        "positive_passages": [{"docid": "d1", "title": "T", "text": "yes"}],
        "negative_passages": [{"docid": 2, "title": "", "text": "no", "score": -1}],
        "subset": "more fields are allowed",
    }
    assert _read(tmp_path, row) == [
        TrainingRow("q1", "what", [Passage("yes", "T", "d1", None)], [Passage("no", "", "2", -1.0)])
    ]


def test_a_bare_row_gets_its_line_number_as_id(tmp_path):
    rows = _read(tmp_path, GOOD, GOOD)
    assert rows[1] == TrainingRow("2", "q", [Passage("p")], [])
    assert not rows[1].has_teacher_scores


def test_null_titles_ids_and_scores_are_absent(tmp_path):
    row = {
        "query_id": None,
        "query_text": "q",
        "query": None,
        "positive_passages": [{"docid": None, "title": None, "text": "p", "score": None}],
        "negative_passages": None,
    }
    assert _read(tmp_path, row) == [TrainingRow("1", "q", [Passage("p")], [])]


def test_a_title_alone_is_a_passage(tmp_path):
    row = {"query": "q", "positive_passages": [{"title": "T", "text": ""}]}
    assert _read(tmp_path, row)[0].positives == [Passage("", "T")]


def test_the_distillation_form(tmp_path):
    row = {
        "query_id": 5,
        "query": "q",
        "passages": [{"text": "a"}, {"text": "b", "title": "B"}],
        "scores": [1.5, -2],
    }
    (read,) = _read(tmp_path, row)
    assert read == TrainingRow("5", "q", [Passage("a", score=1.5)], [Passage("b", "B", score=-2.0)])
    assert read.has_teacher_scores


def test_scores_beside_the_passages(tmp_path):
    row = {
        "query": "q",
        "positive_passages": [{"text": "a", "score": 3}],
        "negative_passages": [{"text": "b", "score": 0.5}],
    }
    assert _read(tmp_path, row)[0].has_teacher_scores
    del row["negative_passages"][0]["score"]
    assert not _read(tmp_path, row)[0].has_teacher_scores


def test_a_query_of_20000_characters_is_read(tmp_path):
    assert len(_read(tmp_path, {**GOOD, "query": "x" * 20_000})[0].query) == 20_000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"query": "q", ', r"not JSON: Expecting property name"),
        ({"query": "q"}, "field 'positive_passages': expected a list, got nothing"),
        (
            {**GOOD, "positive_passages": []},
            "field 'positive_passages': expected at least one positive passage",
        ),
        (
            {**GOOD, "positive_passages": {"text": "p"}},
            "field 'positive_passages': expected a list, got an object",
        ),
        (
            {**GOOD, "positive_passages": ["p"]},
            r"field 'positive_passages\[0\]': expected an object, got a string",
        ),
        (
            {**GOOD, "positive_passages": [{"text": 3}]},
            r"field 'positive_passages\[0\]\.text': expected a string",
        ),
        (
            {**GOOD, "negative_passages": [{"text": "a"}, {"title": " ", "text": "\n"}]},
            r"field 'negative_passages\[1\]\.text': expected a passage, got an empty one",
        ),
        ({**GOOD, "query": None}, "field 'query': expected a string, got null"),
        ({**GOOD, "query": " "}, "field 'query': expected a query, got an empty one"),
        ({**GOOD, "query": ["q"]}, "field 'query': expected a string, got a list"),
        ({**GOOD, "query_id": 1.5}, "field 'query_id': expected a string, got a number"),
        (
            '{"query": "q", "positive_passages": [{"text": "p", "score": NaN}]}',
            r"field 'positive_passages\[0\]\.score': expected a finite number, got nan",
        ),
        (
            '{"query": "q", "passages": [{"text": "p"}, {"text": "p"}], "scores": [1, Infinity]}',
            r"field 'scores\[1\]': expected a finite number, got inf",
        ),
        (
            {"query": "q", "passages": [{"text": "p"}], "scores": [1, 2]},
            "field 'scores': expected one score for each of 1 passages, got 2",
        ),
        (
            {"query": "q", "passages": [{"text": "p"}]},
            "field 'scores': expected a list, got nothing",
        ),
        (
            {"query": "q", "passages": [], "scores": []},
            "field 'passages': expected at least one passage",
        ),
        (
            r'{"query": "\udc00", "positive_passages": [{"text": "p"}]}',
            "field 'query': contains half of a surrogate",
        ),
    ],
)
def test_a_broken_line_17_names_file_line_and_field(tmp_path, row, message):
    with pytest.raises(FormatError, match=r"train\.jsonl:17: " + message) as error:
        _read(tmp_path, *[GOOD] * 16, row)
    assert error.value.line == 17


def test_rows_before_the_broken_one_are_already_there(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD) + "\n{\n")
    rows = read_training(path)
    assert next(rows).query == "q"
    with pytest.raises(FormatError):
        next(rows)
