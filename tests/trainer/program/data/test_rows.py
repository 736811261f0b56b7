"""The dataset is checked as a whole; every error names file and line."""

import gzip
import json

import pytest
from tests.support.tiny_model import tiny_tokenizer

from tevatron.core.errors import FormatError
from tevatron.core.prompts import Renderer, get_template
from tevatron.trainer.program.data.rows import Demands, RowFile, prepare_rows

RENDERER = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=120)
GOOD = {
    "query_id": "q1",
    "query": "who",
    "positive_passages": [{"title": "T", "text": "one", "score": 2.0}],
    "negative_passages": [{"text": "two", "score": -1.0}],
}
TWO = Demands(group_size=2, needs_teacher=False)


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def prepare(tmp_path, rows, demands=TWO, renderer=RENDERER):
    return prepare_rows(
        write(tmp_path / "train.jsonl", rows), tmp_path / "run", renderer=renderer, demands=demands
    )


def test_rows_can_be_read_by_number_in_any_order(tmp_path):
    rows = prepare(tmp_path, [{**GOOD, "query_id": str(i), "query": f"q{i}"} for i in range(5)])
    assert len(rows) == 5
    assert [rows[i].query for i in (4, 0, 2)] == ["q4", "q0", "q2"]
    assert rows[3].positives[0] == ("one", "T", None, 2.0)
    assert rows[3].negatives[0].score == -1.0


def test_a_compressed_file_and_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(f"\n{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n".encode()))
    assert len(prepare_rows(path, tmp_path / "run", renderer=RENDERER, demands=TWO)) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"query": ', r"train.jsonl:17: not JSON"),
        ({**GOOD, "positive_passages": []}, r"train.jsonl:17: .*at least one positive passage"),
        ({**GOOD, "query": "x" * 20000}, r"train.jsonl:17: field 'query': .*20000 characters"),
        ({**GOOD, "negative_passages": [{"text": " "}]}, r"train.jsonl:17: .*empty"),
        (
            {**GOOD, "negative_passages": []},
            r"train.jsonl:17: .*train_group_size 2 needs at least one",
        ),
    ],
)
def test_a_bad_line_17(tmp_path, bad, words):
    with pytest.raises(FormatError, match=words):
        prepare(tmp_path, [GOOD] * 16 + [bad] + [GOOD])
    assert not (tmp_path / "run" / "data").exists()


def test_a_nan_among_the_teachers_scores(tmp_path):
    text = json.dumps(
        {"query": "who", "passages": [{"text": "a"}, {"text": "b"}], "scores": [1.0, float("nan")]}
    )
    with pytest.raises(
        FormatError, match=r"train.jsonl:2: field 'scores\[1\]': expected a finite number, got nan"
    ):
        prepare(tmp_path, [GOOD, text])


def test_a_loss_with_a_teacher_needs_every_score(tmp_path):
    without = {**GOOD, "negative_passages": [{"text": "two"}]}
    assert len(prepare(tmp_path, [GOOD, without])) == 2
    with pytest.raises(
        FormatError, match=r"train.jsonl:2: field 'scores': .*without a teacher's score"
    ):
        prepare(tmp_path, [GOOD, without], Demands(group_size=2, needs_teacher=True))


def test_a_group_of_one_needs_no_negatives(tmp_path):
    assert len(prepare(tmp_path, [{**GOOD, "negative_passages": []}], Demands(1, False))) == 1


def test_an_empty_and_a_missing_file(tmp_path):
    with pytest.raises(FormatError, match="at least one training row"):
        prepare(tmp_path, [])
    with pytest.raises(FormatError, match="no such file"):
        prepare_rows(tmp_path / "no.jsonl", tmp_path / "run", renderer=RENDERER, demands=TWO)


def test_a_query_that_leaves_room_for_some_of_its_passages_only(tmp_path):
    # The first character of the negative takes four tokens.
    row = {
        "query": "qqqqq",
        "positive_passages": [{"text": "a"}],
        "negative_passages": [{"text": "b"}, {"text": "\U0001f600"}],
    }
    for max_length, fits in ((63, False), (64, True)):
        renderer = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=max_length)
        if fits:
            assert len(prepare(tmp_path, [row], renderer=renderer)) == 1
        else:
            with pytest.raises(FormatError, match=r"train\.jsonl:1: field 'query'"):
                prepare(tmp_path, [row], renderer=renderer)


def test_what_is_checked_already_is_not_read_again(tmp_path):
    prepare(tmp_path, [GOOD])
    mark = tmp_path / "run" / "data" / "rows.jsonl"
    before = mark.stat().st_mtime_ns
    prepare(tmp_path, [GOOD])
    assert mark.stat().st_mtime_ns == before
    assert len(prepare(tmp_path, [GOOD, GOOD])) == 2
    shorter = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=60)
    with pytest.raises(FormatError, match="max_length is 60"):
        prepare(tmp_path, [GOOD, {**GOOD, "query": "q" * 50}], renderer=shorter)


def test_a_half_written_copy_is_not_taken(tmp_path):
    (tmp_path / "run" / "data.tmp").mkdir(parents=True)
    (tmp_path / "run" / "data.tmp" / "rows.jsonl").write_text("broken")
    prepare(tmp_path, [GOOD])
    assert len(RowFile(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "data.tmp").exists()
