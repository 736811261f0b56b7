import gzip
import random
import tracemalloc

import pytest

from tevatron.core.errors import FormatError
from tevatron.core.formats import files
from tevatron.core.formats.ranklist import RunSize, check_ranklist, read_ranklist, write_ranklist


def _read(tmp_path, text):
    path = tmp_path / "run"
    path.write_text(text)
    return read_ranklist(path)


def _check(tmp_path, text):
    path = tmp_path / "run"
    path.write_text(text)
    return check_ranklist(path)


def test_three_columns_with_tabs_or_blanks(tmp_path):
    assert _read(tmp_path, "q1\td#1\t1.5\nq1 d2   -2e-3\nq2\td1\t3\n") == {
        "q1": {"d#1": 1.5, "d2": -0.002},
        "q2": {"d1": 3.0},
    }


def test_trec_with_rank_0_everywhere(tmp_path):
    assert _read(tmp_path, "q1 Q0 d1 0 2.5 tag\nq1\tQ0\td2\t0\t1.5\ttag\n") == {
        "q1": {"d1": 2.5, "d2": 1.5}
    }


def test_queries_need_not_be_together(tmp_path):
    assert _read(tmp_path, "a x 1\nb x 1\na y 2\n") == {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 1.0}}


def test_ids_may_hold_other_white_space_and_a_line_separator(tmp_path):
    assert _read(tmp_path, "q\u00a01\td\u20281\t1\n") == {"q\u00a01": {"d\u20281": 1.0}}


def test_gzip_bom_and_crlf(tmp_path):
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfq d 1\r\n\r\nq e 2\r\n"))
    assert read_ranklist(path) == {"q": {"d": 1.0, "e": 2.0}}


def test_an_empty_file_is_an_empty_run(tmp_path):
    assert _read(tmp_path, "\n") == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q d", r"run:2: expected 3 columns .* or TREC's 6, got 2"),
        ("q d 1 2", "got 4"),
        ("q Q0 d 1 2.0", "got 5"),
        ("q d best", "run:2: field 'score': expected a number, got 'best'"),
        ("q\ta b c d\t2", "run:2: expected 3 columns as in the lines before, got 6"),
        ("q d nan", "run:2: field 'score': the score of document 'd' of query 'q' is NaN"),
        ("q d -NaN", "run:2: field 'score': the score of document 'd' of query 'q' is NaN"),
        ("q one 2", "run:2: field 'docid': document 'one' is given twice for query 'q'"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, message):
    for read in (_read, _check):
        with pytest.raises(FormatError, match=message):
            read(tmp_path, f"q one 1\n{line}\n")


def test_a_document_given_twice_is_found_in_scattered_lines(tmp_path):
    for read in (_read, _check):
        with pytest.raises(
            FormatError, match=r"run:3: .*document 'x' is given twice for query 'a'"
        ):
            read(tmp_path, "a x 1\nb x 1\na x 2\n")


def test_a_run_is_checked_query_by_query(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 10_000)
    lines = [f"q{query}\tdoc{doc}\t{-doc}\n" for query in range(500) for doc in range(100)]
    (tmp_path / "run").write_text("".join(lines))
    tracemalloc.start()
    size = check_ranklist(tmp_path / "run")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == RunSize(500, 50_000)
    assert peak < 2_000_000  # the whole run takes four times as much
    random.Random(1).shuffle(lines)
    (tmp_path / "run").write_text("".join(lines))
    assert check_ranklist(tmp_path / "run") == size


@pytest.mark.parametrize("trec", [False, True])
def test_a_written_run_reads_back_in_full_precision(tmp_path, trec):
    run = {"q2": {"b": 0.1 + 0.2, "a": 1e-17}, "q1": {"x": -3.0}}
    write_ranklist(tmp_path / "run", run, trec=trec)
    assert read_ranklist(tmp_path / "run") == run


def test_written_best_first_and_ties_as_trec_eval_breaks_them(tmp_path):
    write_ranklist(tmp_path / "run", {"q": {"b": 1.0, "c": 2.0, "a": 1.0}})
    assert (tmp_path / "run").read_text() == "q\tc\t2.0\nq\tb\t1.0\nq\ta\t1.0\n"
    write_ranklist(tmp_path / "run", {"q": {"b": 1.0, "c": 2.0}}, trec=True)
    assert (tmp_path / "run").read_text() == "q Q0 c 1 2.0 tevatron\nq Q0 b 2 1.0 tevatron\n"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            {"q 1": {"d": 1.0}},
            "field 'query_id': an id cannot be empty or contain white space, got 'q 1'",
        ),
        ({"q": {"": 1.0}}, "field 'docid': an id cannot be empty"),
        ({"q": {"d": float("nan")}}, "field 'score': score of query 'q', document 'd' is nan"),
    ],
)
def test_what_would_not_read_back_is_refused(tmp_path, run, message):
    with pytest.raises(FormatError, match=message):
        write_ranklist(tmp_path / "run", run)


def test_infinite_scores_rank_first_and_last(tmp_path):
    run = {"q": {"a": float("inf"), "b": 1.0, "c": float("-inf")}}
    assert _read(tmp_path, "q c -inf\nq b 1\nq a Inf\n") == run
    write_ranklist(tmp_path / "run", run)
    assert read_ranklist(tmp_path / "run") == run


def test_docids_with_a_hash_are_kept_whole(tmp_path):
    assert _read(tmp_path, "q\tmsmarco_v2.1_doc_0#1\t2\n") == {"q": {"msmarco_v2.1_doc_0#1": 2.0}}


def test_a_tag_may_have_blanks_in_it(tmp_path):
    assert _read(tmp_path, "q Q0 d 1 2.5 my own run\n") == {"q": {"d": 2.5}}


def test_lines_may_be_shuffled(tmp_path):
    lines = [f"q{n % 3} Q0 d{n} 0 {n / 7!r} x\n" for n in range(300)]
    whole = _read(tmp_path, "".join(lines))
    random.Random(3).shuffle(lines)
    assert _read(tmp_path, "\r\n".join(line.strip() for line in lines)) == whole
    assert sum(map(len, whole.values())) == 300


def test_ranks_in_place_of_scores_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"expected scores, got ranks \(MS MARCO's form\?\)"):
        _read(tmp_path, "q\ta\t1\nq\tb\t2\nq\tc\t3\np\ta\t1\n")
    assert _read(tmp_path, "q\ta\t1\nq\tb\t2\n") == {"q": {"a": 1.0, "b": 2.0}}
    assert len(_read(tmp_path, "q Q0 a 0 1 x\nq Q0 b 0 2 x\nq Q0 c 0 3 x\n")["q"]) == 3


def test_a_broken_line_behind_many_is_named(tmp_path):
    text = "".join(f"q Q0 d{n} {n} {-n} run\n" for n in range(100_000))
    with pytest.raises(
        FormatError, match=r"run:100001: field 'docid': document 'd7' is given twice"
    ):
        _read(tmp_path, text + "q Q0 d7 1 1 run\n")
