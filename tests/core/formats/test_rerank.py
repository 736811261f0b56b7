import pytest

from tevatron.core.errors import FormatError
from tevatron.core.formats.rerank import RerankRow, read_rerank, write_rerank


def test_rows_read_back_as_written(tmp_path):
    rows = [
        RerankRow("q1", "ünï", "d#1", "T", "line one\nline two\u2028", 3.25),
        RerankRow("q1", "ünï", "d2", "", ""),
    ]
    write_rerank(tmp_path / "rerank.jsonl", rows)
    assert list(read_rerank(tmp_path / "rerank.jsonl")) == rows


def test_more_fields_are_left_out_and_ids_may_be_numbers(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"query_id": 1, "query": "q", "docid": 2, "url": "x"}\n')
    assert list(read_rerank(path)) == [RerankRow("1", "q", "2")]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"query": "q", "docid": "d"}', "query_id"),
        ('{"query_id": "1", "docid": "d"}', "query"),
        ('{"query_id": "1", "query": "q"}', "docid"),
        ('{"query_id": "1", "query": "q", "docid": "d", "score": NaN}', "score"),
        ('{"query_id": "1", "query": "q", "docid": "d", "title": 1}', "title"),
    ],
)
def test_broken_fields_are_named(tmp_path, line, field):
    path = tmp_path / "a"
    path.write_text(line)
    with pytest.raises(FormatError, match=rf"a:1: field '{field}'"):
        list(read_rerank(path))
