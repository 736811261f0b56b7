import json
import math

import pytest
from pydantic import ValidationError
from tests.support.tiny_model import tiny_tokenizer

from tevatron.core.contracts.checkpoint import (
    CheckpointContract,
    Probe,
    TemplateContract,
    answer_ids_of,
    check_head,
    check_request_prefixes,
    check_scores,
    check_token_ids,
    check_tokenizer,
    measured_tolerance,
    read_contract,
    renderer,
    tolerance_for,
    write_contract,
)
from tevatron.core.contracts.probes import PROBE_PAIRS, renderable_probes
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ContractError, InputError, PromptError
from tevatron.core.prompts import Renderer, get_template

SCORES = [2.0, -1.0, 0.5, -3.0]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def folder(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _contract(tokenizer, *, name="tevatron", head=Head.YES_NO, max_length=128, **changes):
    built = Renderer(get_template(name), tokenizer, max_length=max_length)
    pairs = renderable_probes(built)[: len(SCORES)]
    fields = {
        "template": TemplateContract.of(built),
        "answer_ids": answer_ids_of(built),
        "head": head,
        "max_length": max_length,
        "dtype": "float32",
        "base_model": "tiny",
        "base_model_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "training_data_sha256": None,
        "arguments": None,
        "code_version": "0",
        "probes": [
            Probe(
                query=pair.query,
                title=pair.title,
                text=pair.text,
                token_ids=built.render(pair).ids,
                score=score,
            )
            for pair, score in zip(pairs, SCORES, strict=True)
        ],
        **changes,
    }
    return CheckpointContract(**fields)


def _changed(contract, **changes):
    return CheckpointContract.model_validate({**contract.model_dump(), **changes})


def test_a_contract_reads_back_as_it_was_written(tmp_path, tokenizer):
    contract = _contract(tokenizer)
    write_contract(tmp_path, contract)
    assert read_contract(tmp_path) == contract
    stored = json.loads((tmp_path / "reranker.json").read_text())
    assert stored["schema_version"] == 1
    assert stored["template"]["text"].startswith("{query_prefix} {query}")
    assert (stored["template"]["yes"], stored["template"]["no"]) == (" yes", " no")
    assert stored["tolerance"] == {"float32": 0.001}


def test_a_folder_without_a_contract_has_none(tmp_path):
    assert read_contract(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"reranker\.json: field '': Invalid JSON"),
        ("{}", r"reranker\.json: field 'template': Field required"),
        ('{"schema_version": 2}', r"field 'schema_version': Input should be 1, got '2'"),
    ],
)
def test_a_broken_contract_names_file_and_field(tmp_path, text, message):
    (tmp_path / "reranker.json").write_text(text)
    with pytest.raises(ContractError, match=message):
        read_contract(tmp_path)


def test_head_and_answers_go_together(tokenizer):
    with pytest.raises(ValidationError, match="do not go together"):
        _contract(tokenizer, head=Head.SEQ_CLS)
    assert _contract(tokenizer, name="pair", head=Head.SEQ_CLS).answer_ids is None


def test_a_probe_score_that_is_not_finite_is_refused(tokenizer):
    contract = _contract(tokenizer)
    broken = [{**probe.model_dump(), "score": math.nan} for probe in contract.probes]
    with pytest.raises(ValidationError, match="finite number"):
        _changed(contract, probes=broken)


def test_the_contract_builds_its_renderer(tokenizer):
    contract = _contract(tokenizer)
    built = renderer(contract, tokenizer)
    check_token_ids(contract, built)
    assert (built.max_length, built.query_prefix, built.append_eos) == (128, "query:", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "gone"}, "the contract's unknown prompt template 'gone'"),
        ({"version": 9}, "template 'tevatron' differs: contract has version 9, this build 1"),
        ({"text": "other"}, "template 'tevatron' version 1 differs: contract has 'other'"),
        ({"yes": "Yes"}, "answers of template 'tevatron' differ: contract has 'Yes' and ' no'"),
        ({"append_eos": True}, "cannot be used with this tokenizer: append_eos_token"),
    ],
)
def test_a_template_that_differs_is_refused(tokenizer, changes, message):
    contract = _contract(tokenizer)
    template = {**contract.template.model_dump(), **changes}
    with pytest.raises(ContractError, match=message):
        renderer(_changed(contract, template=template), tokenizer)


def test_answer_ids_that_differ_are_refused_with_both(tokenizer):
    contract = _changed(_contract(tokenizer), answer_ids={"yes": 7, "no": 8})
    with pytest.raises(ContractError, match=r"contract yes=7 no=8, this tokenizer yes=259 no=261"):
        renderer(contract, tokenizer)


def test_a_tokenizer_with_two_tokens_for_yes_is_refused(tokenizer):
    other = tiny_tokenizer()
    other.add_tokens([" y"])
    with pytest.raises(ContractError, match="must be one token of its own"):
        renderer(_contract(tokenizer), other)


def test_the_first_probe_that_renders_differently_is_shown(tokenizer):
    contract = _contract(tokenizer)
    other = Renderer(get_template("tevatron"), tokenizer, max_length=128, query_prefix="Query:")
    with pytest.raises(
        ContractError, match=r"probe 0 \(query 'how do bees.*from token 0 on: contract \[80, 84"
    ):
        check_token_ids(contract, other)


def test_another_length_is_found_by_the_long_probe(tokenizer):
    built = Renderer(get_template("tevatron"), tokenizer, max_length=200)
    long = PROBE_PAIRS[10]
    probe = Probe(
        query=long.query,
        title=long.title,
        text=long.text,
        token_ids=built.render(long).ids,
        score=0,
    )
    contract = _contract(tokenizer, max_length=200, probes=[probe])
    check_token_ids(contract, built)
    with pytest.raises(ContractError, match="of 200 tokens, got"):
        check_token_ids(contract, Renderer(get_template("tevatron"), tokenizer, max_length=199))


def test_head_mismatch(tokenizer):
    check_head(_contract(tokenizer), Head.YES_NO)
    with pytest.raises(
        ContractError, match="contract has 'yes_no', the model is loaded with 'seq_cls'"
    ):
        check_head(_contract(tokenizer), Head.SEQ_CLS)


# Scores


def test_scores_within_the_tolerance_give_the_largest_difference(tokenizer):
    contract = _contract(tokenizer)
    assert check_scores(contract, [2.0, -1.0005, 0.5, -3.0], dtype="float32") == pytest.approx(
        0.0005
    )


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            [2.0, -1.0, 0.502, -3.0],
            "probe 2 .*contract 0.500000, got 0.502000, difference 0.002000, allowed 0.001000",
        ),
        ([2.0, -1.0, math.nan, -3.0], "probe 2 .*got nan"),
        ([2.0, math.inf, 0.5, -3.0], "probe 1 .*got inf"),
        ([2.0, -1.0, 0.5], "expected the scores of 4 probes, got 3"),
    ],
)
def test_scores_that_differ_are_refused_with_numbers(tokenizer, scores, message):
    with pytest.raises(ContractError, match=message):
        check_scores(_contract(tokenizer), scores, dtype="float32")


def test_half_precision_uses_the_stored_tolerance(tokenizer):
    contract = _contract(tokenizer, tolerance={"bfloat16": 0.1})
    assert check_scores(contract, [2.05, -1.0, 0.5, -3.0], dtype="bfloat16") == pytest.approx(0.05)
    with pytest.raises(ContractError, match=r"difference 0.200000, allowed 0.100000"):
        check_scores(contract, [2.2, -1.0, 0.5, -3.0], dtype="bfloat16")


def test_half_precision_never_allows_more_than_half_the_deviation(tokenizer):
    contract = _contract(tokenizer, tolerance={"bfloat16": 50.0})
    # Deviation of 2, -1, .5 and -3: mean -.375, squares 5.640625 + .390625 + .765625 + 6.890625, over 4.
    assert tolerance_for(contract, dtype="bfloat16") == pytest.approx(math.sqrt(13.6875 / 4) / 2)


def test_half_precision_without_a_tolerance_is_refused(tokenizer):
    with pytest.raises(ContractError, match="no tolerance for bfloat16: it was proved in float32"):
        check_scores(_contract(tokenizer), SCORES, dtype="bfloat16")


def test_measured_tolerance_is_twice_what_was_seen_up_to_half_the_deviation():
    assert measured_tolerance([2.0, -2.0], [2.1, -2.0]) == pytest.approx(0.2)
    assert measured_tolerance([2.0, -2.0], [2.9, -2.0]) == 1.0
    assert measured_tolerance([2.0, -2.0], [2.0, -2.0]) == 1e-3
    with pytest.raises(ContractError, match=r"moves a probe's score by 1.100000, more than half"):
        measured_tolerance([2.0, -2.0], [3.1, -2.0])
    with pytest.raises(ContractError, match="by nan"):
        measured_tolerance([2.0, -2.0], [math.nan, -2.0])


# Prefixes of a request


@pytest.mark.parametrize("given", [None, "query:"])
def test_the_contracts_prefix_passes(tokenizer, given):
    built = Renderer(get_template("tevatron"), tokenizer, max_length=128)
    check_request_prefixes(built, query_prefix=given, passage_prefix=None)


def test_another_prefix_is_refused(tokenizer):
    built = Renderer(get_template("tevatron"), tokenizer, max_length=128)
    with pytest.raises(
        PromptError, match=r"passage_prefix differs: .* 'passage:', the request has 'document: '"
    ):
        check_request_prefixes(built, query_prefix="query:", passage_prefix="document: ")


def test_a_template_without_prefixes_takes_the_reference_clients_defaults_only():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    built = Renderer(get_template("qwen3_reranker"), tokenizer, max_length=700)
    check_request_prefixes(built, query_prefix="query:", passage_prefix="passage:")
    with pytest.raises(PromptError, match="query_prefix differs"):
        check_request_prefixes(built, query_prefix="Question:", passage_prefix=None)


# Probes


def test_probes_hold_what_has_gone_wrong_before():
    assert any(pair.title == "" for pair in PROBE_PAIRS)
    assert any("-" in pair.title for pair in PROBE_PAIRS)
    assert any(not pair.text.isascii() for pair in PROBE_PAIRS)
    assert any(len(pair.text) > 10_000 for pair in PROBE_PAIRS)
    assert len(set(PROBE_PAIRS)) == len(PROBE_PAIRS)


def test_probes_that_do_not_fit_are_left_out_and_too_few_are_an_error(tokenizer):
    fitting = renderable_probes(Renderer(get_template("tevatron"), tokenizer, max_length=76))
    assert 3 <= len(fitting) < len(PROBE_PAIRS)
    with pytest.raises(PromptError, match="max_length 40 is too short for template 'tevatron'"):
        renderable_probes(Renderer(get_template("tevatron"), tokenizer, max_length=40))


# The tokenizer on disk


def test_another_tokenizer_in_the_folder_is_refused(folder, tokenizer):
    contract = _contract(tokenizer, tokenizer_sha256=tokenizer_sha256(folder))
    check_tokenizer(contract, folder)
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    other.save_pretrained(folder)
    with pytest.raises(
        ContractError, match=rf"contract has sha256 {contract.tokenizer_sha256[:16]}\.\.\., got "
    ):
        check_tokenizer(contract, folder)


def test_a_folder_without_a_tokenizer_is_named(tmp_path, tokenizer):
    with pytest.raises(
        InputError, match=rf"model folder {tmp_path} has no tokenizer: expected tokenizer\.json"
    ):
        check_tokenizer(_contract(tokenizer), tmp_path)
