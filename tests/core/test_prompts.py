import json
import time
from pathlib import Path

import pytest
from tests.support.qwen3 import qwen3_tokenizer_folder
from tests.support.tiny_model import tiny_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer

from tevatron.core.errors import EmptyPromptError, PromptError, QueryTooLongError
from tevatron.core.prompts import TEMPLATES, Pair, Renderer, get_template

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference_prompts.json").read_text())
ROWS = REFERENCE["rows"]
QUESTION = "\nIs the passage relevant to the query?"


@pytest.fixture(scope="module")
def qwen3():
    return AutoTokenizer.from_pretrained(qwen3_tokenizer_folder())


@pytest.fixture(scope="module")
def tiny():
    return tiny_tokenizer()


def _pair(row):
    return Pair(query=row["query"], title=row["title"], text=row["text"])


def _renderer(name, tokenizer, row=None, max_length=4096, **options):
    if row is not None and name != "qwen3_reranker":
        options = {
            "query_prefix": row["query_prefix"],
            "passage_prefix": row["passage_prefix"],
            **options,
        }
    return Renderer(get_template(name), tokenizer, max_length=max_length, **options)


def test_the_reference_has_96_rows():
    assert len(ROWS) == 96


@pytest.mark.parametrize("name", ["tevatron", "pair", "qwen3_reranker"])
def test_strings_equal_the_reference(name, tiny):
    renderers = {}
    for row in ROWS:
        key = (row["query_prefix"], row["passage_prefix"])
        renderer = renderers.setdefault(key, _string_renderer(name, tiny, row))
        assert renderer.text(_pair(row)) == row[name]


def _string_renderer(name, tokenizer, row):
    # The tiny tokenizer has no one-token "yes" for the chat form; strings do not need the answers.
    if name != "qwen3_reranker":
        return _renderer(name, tokenizer, row)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    return _renderer(name, tokenizer, row)


@pytest.mark.parametrize("name", ["tevatron", "qwen3_reranker"])
def test_qwen3_ids_equal_the_reference(name, qwen3):
    for row in ROWS:
        rendered = _renderer(name, qwen3, row).render(_pair(row))
        assert rendered.ids == row[f"qwen3_ids_{name}"]
        assert rendered.truncated_tokens == 0


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [("tevatron", 9834, 902), ("relevant", 9834, 902), ("qwen3_reranker", 9693, 2152)],
)
def test_answer_ids_of_qwen3(name, yes, no, qwen3):
    assert _renderer(name, qwen3).answer_ids == (yes, no)


def test_pair_has_no_answers(tiny):
    assert _renderer("pair", tiny).answer_ids is None


def test_relevant_reads_as_the_paper_prints_it(tiny):
    renderer = _renderer("relevant", tiny)
    assert renderer.text(Pair(query=" q ", title="T", text="x ")) == "q T x relevant:"
    assert renderer.text(Pair(query="q", text="x")) == "q x relevant:"


def test_readable_form_shows_the_slots():
    readable = get_template("tevatron").readable()
    assert readable == "{query_prefix} {query} {passage_prefix} {title} {text}" + QUESTION


def test_registry_keys_are_the_templates_names():
    assert {name: template.name for name, template in TEMPLATES.items()} == {
        "tevatron": "tevatron",
        "qwen3_reranker": "qwen3_reranker",
        "relevant": "relevant",
        "pair": "pair",
    }


def test_unknown_template_lists_what_there_is():
    with pytest.raises(
        PromptError, match=r"unknown prompt template 'tevatorn'.*Did you mean 'tevatron'"
    ):
        get_template("tevatorn")


# Truncation


LONG = "The ledger of the harbour, which is long, says nothing new. Why? " * 60


@pytest.mark.parametrize("max_length", [40, 64, 100, 257])
@pytest.mark.parametrize("name", ["tevatron", "relevant", "qwen3_reranker", "pair"])
def test_a_cut_prompt_keeps_the_start_and_the_templates_end(name, max_length, qwen3):
    max_length += 80 if name == "qwen3_reranker" else 0
    pair = Pair(query="what is in the ledger", title="Harbour", text=LONG)
    renderer, whole = _renderer(name, qwen3, max_length=max_length), _renderer(name, qwen3)
    everything = whole.render(pair).ids
    rendered = renderer.render(pair)
    end = {
        "tevatron": qwen3.encode(QUESTION),
        "relevant": qwen3.encode(" relevant:"),
        "qwen3_reranker": qwen3.encode(REFERENCE["qwen3"]["suffix"]),
        "pair": [],
    }[name]
    assert max_length - 3 <= len(rendered.ids) <= max_length
    assert rendered.truncated_tokens == len(everything) - len(rendered.ids)
    kept = len(rendered.ids) - len(end)
    assert rendered.ids[kept:] == end
    assert rendered.ids[:kept] == everything[:kept]


def test_a_cut_prompt_is_the_encoding_of_a_string(qwen3):
    renderer = _renderer("tevatron", qwen3, max_length=64)
    for text in (LONG, "? ! " * 500, "漢字 😀 " * 300, "x" * 5000, "e\u0301" * 900):
        ids = renderer.render(Pair(query="q", text=text)).ids
        assert qwen3.encode(qwen3.decode(ids)) == ids
        assert qwen3.decode(ids).endswith(QUESTION)


def test_a_passage_that_always_joins_the_end_is_cut_all_the_same(qwen3):
    rendered = _renderer("tevatron", qwen3, max_length=64).render(Pair(query="q", text="? " * 3000))
    assert qwen3.decode(rendered.ids).endswith("?" + QUESTION)
    assert 60 <= len(rendered.ids) <= 64


def test_a_prompt_of_exactly_max_length_is_not_cut(tiny):
    pair = Pair(query="abc", text="defgh")
    length = len(_renderer("tevatron", tiny).render(pair).ids)
    assert _renderer("tevatron", tiny, max_length=length).render(pair).truncated_tokens == 0
    cut = _renderer("tevatron", tiny, max_length=length - 1).render(pair)
    assert (tiny.decode(cut.ids), cut.truncated_tokens) == (
        "query: abc passage:  defg" + QUESTION,
        1,
    )


def test_a_character_of_several_tokens_is_never_split(tiny):
    whole = _renderer("tevatron", tiny).render(Pair(query="q", text="漢字漢字"))
    for excess in (1, 2, 3):
        cut = _renderer("tevatron", tiny, max_length=len(whole.ids) - excess)
        assert tiny.decode(cut.render(Pair(query="q", text="漢字漢字")).ids).startswith(
            "query: q passage:  漢字漢\n"
        )


def test_the_text_is_cut_before_the_title(tiny):
    renderer = _renderer("tevatron", tiny, max_length=60)
    ids = renderer.render(Pair(query="q", title="A title", text="and a text")).ids
    assert tiny.decode(ids) == "query: q passage: A ti" + QUESTION


@pytest.mark.parametrize("text", ["", "x", LONG])
def test_a_query_that_fills_the_prompt_is_an_error_with_numbers(text, qwen3):
    renderer = _renderer("tevatron", qwen3, max_length=128)
    with pytest.raises(QueryTooLongError) as error:
        renderer.render(Pair(query="why " * 5000, text=text))
    message = str(error.value)
    assert "query 'why why" in message
    assert "(20000 characters, 5001 tokens)" in message
    assert "max_length is 128" in message


def test_no_room_for_a_single_token_of_the_passage_is_an_error(tiny):
    length = len(_renderer("tevatron", tiny).render(Pair(query="abc", text="")).ids)
    with pytest.raises(QueryTooLongError, match=f"max_length is {length}"):
        _renderer("tevatron", tiny, max_length=length).render(Pair(query="abc", text="defgh"))


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_prompt_without_a_token_is_an_error(text, qwen3):
    renderer = _renderer("pair", qwen3, query_prefix="", passage_prefix="")
    with pytest.raises(EmptyPromptError, match="template 'pair', got query '', title '', text"):
        renderer.render_all([Pair(query="q", text="t"), Pair(query="", text=text)])


def test_an_eos_alone_is_a_prompt(qwen3):
    renderer = _renderer("pair", qwen3, query_prefix="", passage_prefix="", append_eos=True)
    assert renderer.render(Pair(query="", text="")).ids == [qwen3.eos_token_id]


@pytest.mark.parametrize("space", ["\n", " ", "\n\t "])
def test_white_space_before_a_passage_does_not_take_its_room(space, tiny):
    renderer = _renderer("tevatron", tiny, max_length=96)
    pair = Pair(query="q", text=space * 200 + "x" * 100)
    rendered = renderer.render(pair)
    assert len(rendered.ids) == 96
    assert tiny.decode(rendered.ids) == f"query: q passage: {'x' * 40}{QUESTION}"
    assert rendered.truncated_tokens == len(tiny.encode(renderer.text(pair))) - 96


def test_many_pairs_render_as_one_by_one(qwen3):
    renderer = _renderer("tevatron", qwen3, max_length=64)
    pairs = [_pair(row) for row in ROWS if row["query"]] + [Pair(query="q", text=LONG)]
    expected = [renderer.render(pair) for pair in pairs]
    assert renderer.render_all(pairs) == expected
    assert renderer.render_all([]) == []
    # Whoever uses the tokenizer for something else leaves its settings in the library below.
    qwen3(["a", "b c"], padding=True, truncation=True, max_length=2)
    assert renderer.render_all(pairs) == expected


def test_long_passages_render_quickly(qwen3):
    renderer = _renderer("tevatron", qwen3, max_length=512)
    start = time.perf_counter()
    for _ in range(20):
        renderer.render(Pair(query="q", text=LONG))
    assert time.perf_counter() - start < 2


# Special tokens, EOS and prefixes


def _with_post_processor(single):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[("<s>", tokenizer.bos_token_id), ("<|end|>", tokenizer.eos_token_id)],
    )
    return tokenizer


def test_the_tokenizers_own_bos_is_added_once_and_kept_when_cut():
    tokenizer = _with_post_processor("<s> $A")
    for text in ("b", LONG):
        ids = (
            _renderer("tevatron", tokenizer, max_length=100).render(Pair(query="a", text=text)).ids
        )
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) <= 100


def test_a_tokenizer_that_ends_every_text_is_refused_where_an_answer_follows():
    with pytest.raises(PromptError, match="adds nothing at the end of a text"):
        _renderer("tevatron", _with_post_processor("$A <|end|>"))


def test_append_eos_counts_within_max_length(tiny):
    renderer = _renderer("pair", tiny, max_length=30, append_eos=True)
    short = renderer.render(Pair(query="a", text="b"))
    assert tiny.decode(short.ids) == "query: a passage:  b<|end|>"
    assert len(renderer.render(Pair(query="a", text=LONG)).ids) == 30
    assert renderer.render(Pair(query="a", text=LONG)).ids[-1] == tiny.eos_token_id


def test_append_eos_is_refused_where_an_answer_follows(tiny):
    with pytest.raises(PromptError, match="append_eos_token needs the template 'pair'"):
        _renderer("tevatron", tiny, append_eos=True)


def test_append_eos_without_an_eos_token():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(PromptError, match="has no EOS token"):
        _renderer("pair", tokenizer, append_eos=True)


def test_an_answer_of_two_tokens_is_an_error_that_shows_the_ids():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" y"])
    ids = tokenizer.encode(" yes")
    assert len(ids) > 1
    with pytest.raises(PromptError) as error:
        _renderer("tevatron", tokenizer)
    assert (
        f"answer ' yes' of template 'tevatron' must be one token of its own after the prompt, got ids {ids}"
        in str(error.value)
    )


def test_a_prefix_that_the_template_has_no_place_for_is_refused(qwen3):
    with pytest.raises(PromptError, match="has no place for a query_prefix, got 'query:'"):
        _renderer("qwen3_reranker", qwen3, query_prefix="query:")
