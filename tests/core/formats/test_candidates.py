import gzip
import json

import pytest

from tevatron.core.errors import FormatError
from tevatron.core.formats.candidates import check_run, read_candidates, read_run
from tevatron.core.formats.ranklist import RunSize
from tevatron.core.formats.rerank import RerankRow, write_rerank

OLD = [
    {
        "query": "what is tea",
        "hits": [
            {"content": "a drink", "qid": 7, "docid": "d1", "rank": 1, "score": 12.5},
            {"content": "a leaf", "qid": 7, "docid": "d2", "rank": 2, "score": 11},
        ],
    },
    {"query": "nothing found", "hits": []},
]
NEW = [
    {
        "query": {"text": "what is tea", "qid": "7"},
        "candidates": [
            {"docid": "d1", "score": 12.5, "doc": {"title": "Tea", "segment": "a drink"}},
            {"docid": "d2", "score": 11.0, "doc": {"contents": "a leaf"}},
            {"docid": "d3", "score": 10.0},
        ],
    }
]


def _hit(query_id):
    return {"qid": query_id, "docid": "a", "score": 1}


def _write(tmp_path, text):
    path = tmp_path / "candidates"
    path.write_text(text)
    return path


def test_rank_llms_first_form(tmp_path):
    path = _write(tmp_path, json.dumps(OLD, indent=1))
    assert list(read_candidates(path)) == [
        RerankRow("7", "what is tea", "d1", "", "a drink", 12.5),
        RerankRow("7", "what is tea", "d2", "", "a leaf", 11.0),
    ]
    assert read_run(path) == {"7": {"d1": 12.5, "d2": 11.0}}


def test_rank_llms_later_form_as_an_array_and_as_lines(tmp_path):
    rows = [
        RerankRow("7", "what is tea", "d1", "Tea", "a drink", 12.5),
        RerankRow("7", "what is tea", "d2", "", "a leaf", 11.0),
        RerankRow("7", "what is tea", "d3", "", "", 10.0),
    ]
    assert list(read_candidates(_write(tmp_path, json.dumps(NEW)))) == rows
    assert list(read_candidates(_write(tmp_path, json.dumps(NEW[0]) + "\n"))) == rows


def test_the_references_rerank_input_ranks_too(tmp_path):
    rows = [RerankRow("q", "tea", "a", "", "x", 1.0), RerankRow("q", "tea", "b", "", "y", 2.0)]
    write_rerank(tmp_path / "rerank.jsonl", rows)
    assert list(read_candidates(tmp_path / "rerank.jsonl")) == rows
    assert read_run(tmp_path / "rerank.jsonl") == {"q": {"a": 1.0, "b": 2.0}}


def test_the_size_of_any_run(tmp_path):
    assert check_run(_write(tmp_path, json.dumps(NEW))) == RunSize(1, 3)
    assert check_run(_write(tmp_path, "q a 2\nq b 1\np c 1\n")) == RunSize(2, 3)
    with pytest.raises(FormatError, match="document 'a' is given twice"):
        check_run(_write(tmp_path, "q a 2\nq a 1\n"))


def test_columns_are_a_run(tmp_path):
    path = tmp_path / "run.gz"
    path.write_bytes(gzip.compress(b"q a 2\nq b 1\n"))
    assert read_run(path) == {"q": {"a": 2.0, "b": 1.0}}
    assert read_run(_write(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"query": "x", "hits": [_hit("1"), _hit("2")]}],
            r"field 'hits\[1\].qid': expected the query id '1' of the hits before, got '2'",
        ),
        (
            [{"query": "x", "hits": [{"qid": "1", "docid": "a", "score": "high"}]}],
            r"candidates:1: field 'hits\[0\].score': expected a number, got a string",
        ),
        (
            [{"query": "x", "candidates": []}],
            "field 'query': expected an object, got a string",
        ),
        (
            [
                {
                    "query": {"qid": 1, "text": "x"},
                    "candidates": [{"docid": "a", "score": float("nan")}],
                }
            ],
            r"field 'candidates\[0\].score': expected a finite number, got nan",
        ),
        (
            [{"query": {"qid": 1, "text": "x"}, "candidates": [{"docid": "a"}]}],
            "document 'a' of query '1' has no score to rank it by",
        ),
        (
            [{"query_id": 1, "query": "x", "docid": "a", "score": 1}] * 2,
            "document 'a' of query '1' is given twice",
        ),
    ],
)
def test_what_is_broken_is_named(tmp_path, content, message):
    with pytest.raises(FormatError, match=message):
        read_run(_write(tmp_path, json.dumps(content)))
