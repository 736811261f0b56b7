import json
import math
import random

import pytest

from tevatron.core.errors import InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.evaluator.bm25 import STOP_WORDS, Bm25Index, analyze, open_index, search_all
from tevatron.evaluator.metrics import evaluate, parse_metric, rank


def index_of(*texts, titles=None):
    titles = titles or [""] * len(texts)
    return Bm25Index.build(
        Document(f"d{i}", title, text)
        for i, (title, text) in enumerate(zip(titles, texts, strict=True))
    )


def test_terms_are_lower_case_stemmed_and_without_stop_words():
    assert analyze("The Relational databases, and THEIR tables!") == ["relat", "databas", "tabl"]
    assert analyze("vitamin D3 of 0-dimensional x") == ["vitamin", "d3", "0", "dimension", "x"]
    assert analyze("L'\u00c9T\u00c9 \u4e2d\u6587") == ["l", "\u00e9t\u00e9", "\u4e2d\u6587"]
    assert analyze(" \n.,;") == []
    assert len(STOP_WORDS) == 33


def test_scores_are_lucenes_formula():
    # N 3, df 1, dl 3, avgdl 2: idf * tf / (tf + k1 * (1 - b + b * dl / avgdl)), without Lucene's old (k1 + 1).
    index = index_of("cat cat dog", "dog", "bird fish")
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 / (2 + 0.9 * (1 - 0.4 + 0.4 * 3 / 2))
    assert index.search("cat", depth=3) == {"d0": pytest.approx(expected, rel=1e-6)}


def test_repeated_query_words_count_each_time():
    index = index_of("cat dog", "bird fish")
    once, twice = index.search("cat", depth=1)["d0"], index.search("cat cat", depth=1)["d0"]
    assert twice == pytest.approx(2 * once)


def test_title_is_searched_with_the_text():
    assert list(
        index_of("nothing here", "other", titles=["Otter", ""]).search("otters", depth=5)
    ) == ["d0"]


def test_ties_rank_by_docid_descending_also_at_the_cut():
    index = index_of(*["same words"] * 12, "other text")
    assert list(index.search("same", depth=3)) == ["d9", "d8", "d7"]
    found = index.search("same", depth=100)
    assert list(found) == rank(found)
    assert len(found) == 12


def test_order_of_the_corpus_does_not_change_the_run():
    documents = [Document(f"d{i}", "", f"word{i % 3} word{i % 5} common") for i in range(40)]
    shuffled = random.Random(0).sample(documents, len(documents))
    runs = [
        Bm25Index.build(some).search("word1 common word2", depth=7)
        for some in (documents, shuffled)
    ]
    assert list(runs[0]) == list(runs[1])


def test_documents_without_a_query_word_are_not_found():
    index = index_of("cat", "dog")
    assert index.search("bird", depth=10) == {}
    assert index.search("", depth=10) == {}
    assert index.search("the of", depth=10) == {}
    assert search_all(index, {"q1": "cat", "q2": "bird"}, depth=10).keys() == {"q1", "q2"}


def test_empty_documents_are_indexed_and_never_found():
    assert list(index_of("", "cat").search("cat", depth=10)) == ["d1"]


def test_single_document_is_found():
    assert list(index_of("cat").search("cat", depth=10)) == ["d0"]


@pytest.mark.parametrize("texts", [[], [""], ["the of", "..."]])
def test_corpus_without_words_is_refused(texts):
    with pytest.raises(InputError, match=f"{len(texts)} documents and no word"):
        index_of(*texts)


def beir(folder, texts):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts))
    )
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "cat"}\n')
    (folder / "qrels" / "test.tsv").write_text("q\td0\t1\n")
    return BeirFolder(folder)


def test_cached_index_is_used_again_and_gives_the_same_run(tmp_path, monkeypatch):
    dataset = beir(tmp_path / "data", ["cat dog", "cat cat", "bird"])
    cache = tmp_path / "cache"
    runs = [
        open_index(dataset).search("cat dog", depth=3),
        open_index(dataset, cache=cache).search("cat dog", depth=3),
    ]
    # Not built again:
    monkeypatch.setattr(Bm25Index, "build", None)
    runs.append(open_index(dataset, cache=cache).search("cat dog", depth=3))
    assert runs[0] == runs[1] == runs[2]
    assert [path.name[:4] for path in (cache / "bm25").iterdir()] != [".new"]


def test_changed_corpus_gets_an_index_of_its_own(tmp_path):
    cache = tmp_path / "cache"
    assert open_index(beir(tmp_path / "a", ["cat"]), cache=cache).search("dog", depth=1) == {}
    assert list(open_index(beir(tmp_path / "b", ["dog"]), cache=cache).search("dog", depth=1)) == [
        "d0"
    ]
    assert len(list((cache / "bm25").iterdir())) == 2


def test_index_that_another_worker_made_meanwhile_is_taken(tmp_path, monkeypatch):
    dataset, cache = beir(tmp_path / "a", ["cat"]), tmp_path / "cache"
    build = Bm25Index.build

    def build_while_another_does(documents, **options):
        monkeypatch.setattr(Bm25Index, "build", build)
        open_index(dataset, cache=cache)
        return build(documents, **options)

    monkeypatch.setattr(Bm25Index, "build", build_while_another_does)
    assert list(open_index(dataset, cache=cache).search("cat", depth=1)) == ["d0"]
    assert len(list((cache / "bm25").iterdir())) == 1


def test_failed_build_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    def fail(self, folder):
        (folder / "half").write_text("x")
        raise OSError("disk is full")

    monkeypatch.setattr(Bm25Index, "save", fail)
    with pytest.raises(OSError, match="disk is full"):
        open_index(beir(tmp_path / "a", ["cat"]), cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "bm25").iterdir()) == []


def test_indexing_can_be_stopped():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Bm25Index.build([Document("d", "", "cat")], check=stop)
    with pytest.raises(KeyboardInterrupt):
        search_all(index_of("cat"), {"q": "cat"}, depth=1, check=stop)


def test_scifact_has_its_known_effectiveness(shared_data):
    dataset = BeirFolder(shared_data / "scifact")
    queries, qrels = dataset.queries(), dataset.qrels("test")
    run = search_all(open_index(dataset), {qid: queries[qid] for qid in qrels}, depth=100)
    found = evaluate(qrels, run, [parse_metric("ndcg@10"), parse_metric("recall@100")]).means
    assert len(qrels) == 300
    assert found["ndcg@10"] == pytest.approx(0.6769, abs=0.005)
    assert found["recall@100"] == pytest.approx(0.9287, abs=0.01)
