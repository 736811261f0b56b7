import json

import pytest
from tests.support.qwen3 import qwen3_tokenizer_folder
from tests.support.tiny_model import tiny_tokenizer
from transformers import AutoTokenizer

from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.errors import InputError


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _rewrite(folder, change):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=7))


def test_saving_again_keeps_the_hash(folder, tmp_path):
    again = tmp_path / "again"
    AutoTokenizer.from_pretrained(folder).save_pretrained(again)
    assert tokenizer_sha256(again) == tokenizer_sha256(folder)


def test_saving_qwen3_again_keeps_the_hash(tmp_path):
    original = qwen3_tokenizer_folder()
    AutoTokenizer.from_pretrained(original).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (original / "tokenizer.json").read_bytes()
    assert tokenizer_sha256(tmp_path) == tokenizer_sha256(original)


def _merges_as_strings(document):
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]


def _truncation(document):
    document["truncation"] = {
        "max_length": 7,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }


def _no_offsets(document):
    document["pre_tokenizer"]["trim_offsets"] = False


@pytest.mark.parametrize(
    "change", [lambda document: None, _merges_as_strings, _truncation, _no_offsets]
)
def test_what_changes_no_id_keeps_the_hash(folder, change):
    before = tokenizer_sha256(folder)
    _rewrite(folder, change)
    assert tokenizer_sha256(folder) == before


def _swap_merges(document):
    document["model"]["merges"].reverse()


def _swap_vocabulary(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _normalizer(document):
    document["normalizer"] = {"type": "Lowercase"}


def _prefix_space(document):
    document["pre_tokenizer"]["add_prefix_space"] = True


def _added(document):
    document["added_tokens"][0]["lstrip"] = True


def _bos(document):
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>"}}],
    }


@pytest.mark.parametrize(
    "change", [_swap_merges, _swap_vocabulary, _normalizer, _prefix_space, _added, _bos]
)
def test_what_changes_ids_changes_the_hash(folder, change):
    before = tokenizer_sha256(folder)
    _rewrite(folder, change)
    assert tokenizer_sha256(folder) != before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 3}', "[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_sha256(tmp_path)
