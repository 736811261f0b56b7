import pytest

from tevatron.core.errors import FormatError
from tevatron.core.formats.qrels import read_qrels


def _read(tmp_path, text):
    path = tmp_path / "qrels"
    path.write_text(text)
    return read_qrels(path)


def test_trec(tmp_path):
    assert _read(tmp_path, "q1 0 d1 2\nq1\t0\td2\t-1\n") == {"q1": {"d1": 2, "d2": -1}}


def test_beir_with_and_without_its_header(tmp_path):
    assert _read(tmp_path, "query-id\tcorpus-id\tscore\n1\t2\t3\n") == {"1": {"2": 3}}
    assert _read(tmp_path, "1\t2\t0\n") == {"1": {"2": 0}}


def test_the_same_grade_twice_is_one_judgment(tmp_path):
    assert _read(tmp_path, "q 0 d 1\nq 0 d 1\n") == {"q": {"d": 1}}


def test_a_header_is_taken_on_top_only(tmp_path):
    with pytest.raises(FormatError, match=r"qrels:2: .*expected a whole number, got 'score'"):
        _read(tmp_path, "q d 1\nquery-id corpus-id score\n")


def test_an_id_with_a_blank_is_not_read_as_another_judgment(tmp_path):
    with pytest.raises(FormatError, match=r"qrels:2: expected BEIR's 3 .* as in the lines before"):
        _read(tmp_path, "query-id\tcorpus-id\tscore\nq 1\td1\t1\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "q d",
            r"qrels:2: expected TREC's 4 columns or BEIR's 3 \(query-id corpus-id score\), got 2",
        ),
        ("q d 1", "qrels:2: expected TREC's 4 columns as in the lines before, got 3"),
        ("q 0 x 1.5", "qrels:2: field 'score': expected a whole number, got '1.5'"),
        ("q 0 d 2", "qrels:2: field 'score': document 'd' of query 'q' has two grades, 1 and 2"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    with pytest.raises(FormatError, match=message):
        _read(tmp_path, f"q 0 d 1\n{line}\n")
