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


def test_json_lines_as_the_hub_has_them(tmp_path):
    assert _read(
        tmp_path,
        '{"query-id": "q", "corpus-id": 7, "score": 2}\n{"query-id": "q", "corpus-id": "b", "score": 1.0}\n',
    ) == {"q": {"7": 2, "b": 1}}
    with pytest.raises(
        FormatError, match=r"qrels:1: field 'score': expected a whole number, got '0\.5'"
    ):
        _read(tmp_path, '{"query-id": "q", "corpus-id": "b", "score": 0.5}')
    with pytest.raises(
        FormatError, match="qrels:1: field 'corpus-id': expected a string, got nothing"
    ):
        _read(tmp_path, '{"query-id": "q", "score": 1}')


def test_whole_numbers_written_as_fractions_are_whole(tmp_path):
    assert _read(tmp_path, "q 0 a 1.0\nq 0 b -1\n") == {"q": {"a": 1, "b": -1}}


@pytest.mark.parametrize("written", ["0.9", "1_0", "inf", "nan", "x"])
def test_what_is_no_grade_is_refused(tmp_path, written):
    with pytest.raises(FormatError, match=f"qrels:1: .*expected a whole number, got '{written}'"):
        _read(tmp_path, f"q 0 a {written}\n")


def test_ids_with_a_hash_and_windows_line_ends(tmp_path):
    assert _read(tmp_path, "\ufeffq 0 doc#1 1\r\nq 0 doc#2 0\r\n") == {
        "q": {"doc#1": 1, "doc#2": 0}
    }


def test_a_file_without_lines_has_no_judgment(tmp_path):
    assert _read(tmp_path, "\n\n") == {}
