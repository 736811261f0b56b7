import hashlib
import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.support.tiny_model import tiny_folder, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tevatron.core.contracts.checkpoint import (
    CheckpointContract,
    Probe,
    TemplateContract,
    answer_ids_of,
    write_contract,
)
from tevatron.core.contracts.probes import PROBE_PAIRS
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, ContractError, InputError
from tevatron.core.prompts import Pair, Renderer, get_template
from tevatron.scorer.engines import EngineFlags
from tevatron.scorer.loading import load
from tevatron.scorer.served import ServeOptions

MAX_LENGTH = 160
PAIRS = [
    Pair(query="capital of Iceland", title="Reykjavik", text="It is the capital."),
    Pair(query="q", text=""),
    Pair(query="long", text="word " * 400),
    Pair(query="naïve", title="A-B", text="漢字"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def folder(tmp_path, plain):
    """A checkpoint with a contract, made of transformers' own logits."""
    for path in plain.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return _with_contract(tmp_path)


def _own_scores(folder, renderer):
    """Score with transformers alone, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(pair):
        with torch.no_grad():
            logits = model(torch.tensor([renderer.render(pair).ids])).logits[0, -1]
        return float(logits[renderer.answer_ids.yes] - logits[renderer.answer_ids.no])

    return score


def _renderer():
    return Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=MAX_LENGTH)


def _with_contract(folder, **changes):
    """Write a contract that the folder keeps, but for what is changed."""
    renderer = _renderer()
    score = _own_scores(folder, renderer)
    probes = [
        Probe(
            query=pair.query,
            title=pair.title,
            text=pair.text,
            token_ids=renderer.render(pair).ids,
            score=score(pair),
        )
        for pair in [pair for pair in PROBE_PAIRS if len(pair.query) < 30][:6]
    ]
    return _write_contract(folder, **{"probes": probes, **changes})


def _write_contract(folder, **changes):
    renderer = _renderer()
    contract = {
        "template": TemplateContract.of(renderer),
        "answer_ids": answer_ids_of(renderer),
        "head": Head.YES_NO,
        "max_length": MAX_LENGTH,
        "dtype": "float32",
        "base_model": "tiny",
        "base_model_sha256": None,
        "tokenizer_sha256": tokenizer_sha256(folder),
        "training_data_sha256": None,
        "arguments": None,
        "code_version": "0",
        **changes,
    }
    write_contract(folder, CheckpointContract(**contract))
    return folder


def _load(folder, *, backend="hf", **options):
    return load(
        ServeOptions(backend=backend, model=folder, flags=EngineFlags(device="cpu"), **options)
    )


def test_scores_are_transformers_own_logits(folder):
    served = _load(folder)
    own = _own_scores(folder, _renderer())
    ids = [served.renderer.render(pair).ids for pair in PAIRS]
    assert served.engine.score(ids) == pytest.approx([own(pair) for pair in PAIRS], abs=1e-4)
    assert served.info.max_probe_difference < 1e-4
    contract = (folder / "reranker.json").read_bytes()
    assert served.info.contract_sha256 == hashlib.sha256(contract).hexdigest()
    assert (served.info.prompt_template, served.info.max_length) == ("tevatron", MAX_LENGTH)
    assert (served.info.head, served.info.dtype, served.info.backend) == ("yes_no", "float32", "hf")


def test_a_plain_folder_needs_a_template(plain):
    with pytest.raises(
        ConfigError, match=r"has no contract.*say how it is prompted with --prompt_template"
    ):
        _load(plain)
    served = _load(plain, prompt_template="tevatron", max_length=200)
    assert served.info.max_probe_difference is None
    assert served.info.contract_sha256 is None
    assert served.renderer.max_length == 200


def test_a_seq_cls_folder_is_served_with_the_pair_template(tmp_path):
    causal = tiny_folder(tmp_path / "causal")
    model = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1)
    # transformers scores at the last token that is not padding: the EOS must not be the padding too.
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "cls")
    tiny_tokenizer().save_pretrained(tmp_path / "cls")
    served = _load(tmp_path / "cls", prompt_template="pair", append_eos=True)
    pair = Pair(query="a", text="b")
    ids = served.renderer.render(pair).ids
    assert ids[-1] == tiny_tokenizer().eos_token_id
    with torch.no_grad():
        expected = float(model.eval()(torch.tensor([ids])).logits[0, 0])
    assert served.engine.score([ids]) == pytest.approx([expected], abs=1e-4)


def test_template_and_head_go_together(plain):
    with pytest.raises(
        ConfigError,
        match="template 'tevatron' asks for answers, which does not go with head 'seq_cls'",
    ):
        _load(plain, prompt_template="tevatron", head=Head.SEQ_CLS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_template": "relevant"},
            "--prompt_template differs: contract has 'tevatron', got 'relevant'",
        ),
        ({"max_length": 512}, "--rerank_max_len differs: contract has 160, got 512"),
        ({"query_prefix": "Q:"}, "--query_prefix differs: contract has 'query:', got 'Q:'"),
        ({"append_eos": True}, "--append_eos_token differs"),
        ({"head": Head.SEQ_CLS}, "contract has 'yes_no', the model is loaded with 'seq_cls'"),
        ({"dtype": "bfloat16"}, "the contract has no tolerance for bfloat16"),
    ],
)
def test_an_option_that_contradicts_the_contract_is_refused(folder, options, message):
    with pytest.raises(ContractError, match=message):
        _load(folder, **options)


def test_an_option_that_repeats_the_contract_is_fine(folder):
    assert (
        _load(folder, prompt_template="tevatron", max_length=MAX_LENGTH).info.max_length
        == MAX_LENGTH
    )


def test_other_weights_are_refused_with_numbers(folder, tmp_path):
    other = tiny_folder(tmp_path / "other", seed=1)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")
    with pytest.raises(
        ContractError, match=r"probe 0 .*scores differently in float32: contract .*allowed 0\.001"
    ):
        _load(folder)


def test_another_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    other.save_pretrained(folder)
    with pytest.raises(ContractError, match=r"tokenizer of .* differs: contract has sha256"):
        _load(folder)


def test_other_token_ids_are_refused(folder):
    probe = Probe(query="q", title="", text="x", token_ids=[1, 2, 3], score=0.0)
    _with_contract(folder, probes=[probe])
    with pytest.raises(
        ContractError, match=r"probe 0 \(query 'q'\) renders differently from token 0 on"
    ):
        _load(folder)


def test_a_missing_folder_and_a_missing_tokenizer(tmp_path, plain):
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        _load(tmp_path / "gone", prompt_template="tevatron")
    for path in plain.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InputError, match="has no tokenizer"):
        _load(tmp_path, prompt_template="tevatron")


def test_weights_that_give_no_number_are_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    with pytest.raises(ConfigError):
        _load(folder, prompt_template="tevatron")


def test_a_plain_model_is_tried_with_the_longest_prompt(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = tiny_folder(tmp_path, rope_parameters=rope, max_position_embeddings=128)
    with pytest.raises(ConfigError, match="a prompt of 160 tokens: beyond 128 tokens"):
        _load(folder, prompt_template="tevatron", max_length=160)
    _load(folder, prompt_template="tevatron", max_length=128)


def test_a_model_that_scores_everything_alike_is_refused(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = _renderer().answer_ids
    with torch.no_grad():
        model.lm_head.weight[ids.yes] = model.lm_head.weight[ids.no]
    model.save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"each of \d+ different prompts the score 0\.0: it cannot rank"
    ):
        _load(folder, prompt_template="tevatron")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "{query} {text} relevant?"}, "template 'tevatron' version 1 differs"),
        ({"version": 2}, "contract has version 2, this build 1"),
        ({"name": "tevatrom"}, "unknown prompt template 'tevatrom'"),
        ({"yes": " true"}, "answers of template 'tevatron' differ: contract has ' true'"),
        ({"query_prefix": "Q:"}, "renders differently from token 0 on"),
    ],
)
def test_another_template_than_the_contracts_is_refused(folder, changes, message):
    _with_contract(folder, template=TemplateContract.of(_renderer()).model_copy(update=changes))
    with pytest.raises(ContractError, match=message):
        _load(folder)


def test_other_answer_ids_are_refused(folder):
    _with_contract(folder, answer_ids={"yes": 1, "no": 2})
    with pytest.raises(ContractError, match="answer ids differ: contract yes=1 no=2, this token"):
        _load(folder)


def test_a_contract_for_another_head_than_the_files_hold_is_refused(folder, tmp_path_factory):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    other = tmp_path_factory.mktemp("cls")
    model.save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    (other / "reranker.json").write_bytes((folder / "reranker.json").read_bytes())
    with pytest.raises(ConfigError, match=r"holds 'score\.weight', a seq_cls checkpoint"):
        _load(other)


@pytest.fixture
def adapter(tmp_path, plain):
    """An adapter of the plain model with a contract of its own, made of PEFT's logits."""
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(plain), config)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    renderer = _renderer()
    scores = []
    for pair in (pairs := [pair for pair in PROBE_PAIRS if len(pair.query) < 30][:6]):
        with torch.no_grad():
            logits = adapted.eval()(torch.tensor([renderer.render(pair).ids])).logits[0, -1]
        scores.append(float(logits[renderer.answer_ids.yes] - logits[renderer.answer_ids.no]))
    probes = [
        Probe(
            query=pair.query,
            title=pair.title,
            text=pair.text,
            token_ids=renderer.render(pair).ids,
            score=score,
        )
        for pair, score in zip(pairs, scores, strict=True)
    ]
    shutil.copy(plain / "tokenizer.json", folder / "tokenizer.json")
    return _write_contract(folder, probes=probes)


def test_an_adapter_folder_is_a_checkpoint_that_names_its_model(adapter, plain):
    served = _load(adapter)
    assert served.info.max_probe_difference < 1e-4
    assert served.info.model_name_or_path == "adapter"
    assert "peft" in served.info.versions
    assert _load(plain, adapter=adapter).info.max_probe_difference < 1e-4


def test_the_base_model_alone_does_not_keep_the_adapters_contract(adapter, plain, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in plain.iterdir():
        (alone / path.name).symlink_to(path)
    shutil.copy(adapter / "reranker.json", alone / "reranker.json")
    with pytest.raises(ContractError, match="scores differently in float32"):
        _load(alone)


def test_an_adapter_whose_model_is_gone_says_how_to_name_it(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/gone"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="is an adapter of '/gone', which is not there: name its base"
    ):
        _load(adapter)


def test_an_adapter_is_refused_by_an_engine_that_would_serve_the_base_or_worse(adapter, plain):
    for folder, options in ((adapter, {}), (plain, {"adapter": adapter})):
        with pytest.raises(ConfigError, match="engine 'vllm' loads none: publish merged weights"):
            _load(folder, backend="vllm", **options)


def test_a_folder_that_is_no_adapter_is_named(plain, tmp_path):
    with pytest.raises(ConfigError, match=r"expected a folder with adapter_config\.json"):
        _load(plain, adapter=tmp_path, prompt_template="tevatron")
