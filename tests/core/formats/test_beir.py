import gzip

import pytest

from tevatron.core.errors import FormatError, InputError
from tevatron.core.formats.beir import BeirFolder, Document


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "T", "text": "x", "metadata": {}}\n{"_id": 2, "text": ""}\n'
    )
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "what"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    return tmp_path


def test_a_folder(folder):
    beir = BeirFolder(folder)
    assert list(beir.corpus()) == [Document("d1", "T", "x"), Document("2", "", "")]
    assert beir.queries() == {"q1": "what"}
    assert beir.splits() == ["test"]
    assert beir.qrels("test") == {"q1": {"d1": 1}}


def test_compressed_files(folder):
    packed = gzip.compress((folder / "corpus.jsonl").read_bytes())
    (folder / "corpus.jsonl").unlink()
    (folder / "corpus.jsonl.gz").write_bytes(packed)
    (folder / "qrels" / "train.tsv.gz").write_bytes(gzip.compress(b"q1\td1\t1\n"))
    beir = BeirFolder(folder)
    assert len(list(beir.corpus())) == 2
    assert beir.splits() == ["test", "train"]
    assert beir.qrels("train") == {"q1": {"d1": 1}}


def test_judgments_as_json_lines(folder):
    (folder / "qrels" / "dev.v2.jsonl").write_text(
        '{"query-id": "q1", "corpus-id": "d1", "score": 2}\n'
    )
    beir = BeirFolder(folder)
    assert beir.splits() == ["dev.v2", "test"]
    assert beir.qrels("dev.v2") == {"q1": {"d1": 2}}


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_a_missing_part_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(InputError, match=r"is not a BEIR folder: expected (corpus|queries|qrels)"):
        BeirFolder(folder)


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        BeirFolder(tmp_path / "gone")


def test_an_unknown_split_lists_what_there_is(folder):
    with pytest.raises(
        InputError, match=r"unknown split 'tset'; there are: test\. Did you mean 'test'"
    ):
        BeirFolder(folder).qrels("tset")


def test_judgments_without_a_line(folder):
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(FormatError, match="expected judgments, got none"):
        BeirFolder(folder).qrels("test")


def test_ids_given_twice(folder):
    (folder / "corpus.jsonl").write_text('{"_id": "1", "text": "x"}\n{"_id": 1, "text": "y"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "1", "text": "x"}\n{"_id": "1", "text": "y"}\n')
    with pytest.raises(
        FormatError, match=r"corpus\.jsonl:2: field '_id': document '1' is given twice"
    ):
        list(BeirFolder(folder).corpus())
    with pytest.raises(
        FormatError, match=r"queries\.jsonl:2: field '_id': query '1' is given twice"
    ):
        BeirFolder(folder).queries()


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_an_id_that_no_run_could_hold_is_named(folder, name):
    (folder / name).write_text('{"_id": "1", "text": "x"}\n{"_id": "doc 2", "text": "y"}\n')
    beir = BeirFolder(folder)
    with pytest.raises(FormatError, match=rf"{name}:2: field '_id': .* white space.* got 'doc 2'"):
        list(beir.corpus() if name == "corpus.jsonl" else beir.queries())
