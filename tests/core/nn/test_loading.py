"""Loading: what is refused, and that nothing random fills a gap."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny_model import tiny_config, tiny_folder
from transformers import (
    AutoModelForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
)

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.nn.attention import ATTENTION
from tevatron.core.nn.forward import SeqClsHead, YesNoHead
from tevatron.core.nn.loading import (
    load_config,
    load_model,
    load_tokenizer,
    score_head,
    tensor_facts,
)


def load(folder, head=Head.YES_NO, **changes):
    return load_model(folder, head, **{"dtype": "float32", "device": "cpu", **changes})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_tensor(folder, name):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_causal_folder_loads_with_packed_attention(tmp_path, kind):
    model = load(tiny_folder(tmp_path, kind))
    assert model.config._attn_implementation == ATTENTION
    assert model.dtype == torch.float32
    assert not model.training


def test_dtype_is_honoured_and_an_unknown_one_named(tmp_path):
    folder = tiny_folder(tmp_path)
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"float32, bfloat16, float16, got 'int8'"):
        load(folder, dtype="int8")


def test_the_tokenizer_loads_and_answers_are_single_tokens(tmp_path):
    tokenizer = load_tokenizer(tiny_folder(tmp_path))
    assert tokenizer.encode(" yes") == [259]
    assert tokenizer.encode(" no") == [261]


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer: expected tokenizer.json"):
        load_tokenizer(folder)


def test_a_broken_tokenizer_says_so(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be loaded"):
        load_tokenizer(folder)


def test_a_causal_checkpoint_is_not_a_seq_cls_one(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no 'score.weight'"):
        load(tiny_folder(tmp_path), Head.SEQ_CLS)


def test_a_seq_cls_checkpoint_is_not_a_causal_one(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'score.weight', a seq_cls checkpoint"):
        load(tmp_path)
    assert load(tmp_path, Head.SEQ_CLS).get_submodule("score").weight.shape == (1, 32)


def test_a_new_head_is_made_only_on_request(tmp_path):
    model = load(tiny_folder(tmp_path), Head.SEQ_CLS, new_head=True)
    assert model.get_submodule("score").weight.shape == (1, 32)


def test_more_than_one_label_is_refused(tmp_path):
    AutoModelForSequenceClassification.from_config(
        tiny_config("llama", num_labels=3)
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has 3 rows"):
        load(tmp_path, Head.SEQ_CLS)


def test_a_missing_tensor_is_an_error_and_never_random(tmp_path):
    folder = tiny_folder(tmp_path)
    drop_tensor(folder, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"1 tensors are missing.*layers.1.mlp.up_proj"):
        load(folder)


def test_a_missing_language_model_head_is_an_error(tmp_path):
    folder = tiny_folder(tmp_path, "qwen3")
    drop_tensor(folder, "lm_head.weight")
    with pytest.raises(ConfigError, match=r"holds no 'lm_head.weight'"):
        load(folder)


def test_pickled_weights_are_refused_by_name(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"there are pytorch_model.bin, which are not loaded"):
        load(folder)


def test_a_cut_weights_file_is_an_error(tmp_path):
    folder = tiny_folder(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "x"}}, "quantized weights are not supported"),
        ({"model_type": "no_such_model", "auto_map": {"AutoConfig": "x.Y"}}, "without remote code"),
        ({"model_type": "t5"}, "is an encoder-decoder"),
        ({"model_type": "gemma2"}, "caps its attention logits"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
    ],
)
def test_architectures_that_cannot_be_scored_are_refused(tmp_path, changes, words):
    folder = tiny_folder(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=words):
        load_config(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        load(tmp_path)


def test_a_model_with_other_logits_than_ours_is_refused(tmp_path, monkeypatch):
    folder = tiny_folder(tmp_path)
    own = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits * 3
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ConfigError, match=r"does not score as transformers does"):
        load(folder)


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path):
    folder = tiny_folder(tmp_path, "llama")
    edit_config(folder, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ConfigError, match=r"1 layers with a sliding window, 0 of them"):
        load(folder)


def test_tensor_facts_come_from_the_headers(tmp_path):
    facts = tensor_facts(tiny_folder(tmp_path))
    assert facts["model.layers.0.self_attn.k_proj.weight"] == ((16, 32), "model.safetensors")


def test_score_head_needs_both_answers():
    assert score_head(Head.YES_NO, yes=3, no=4) == YesNoHead(yes=3, no=4)
    assert score_head(Head.SEQ_CLS) == SeqClsHead()
    with pytest.raises(ContractError, match=r"yes=3 no=None"):
        score_head(Head.YES_NO, yes=3)


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json beside a model"):
        load(folder)


def test_a_model_that_cannot_be_packed_is_refused_with_any_attention(tmp_path):
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model_type 'bloom' takes no attention function"):
        load(tmp_path, attention="sdpa")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_can_be_packed_loads_with_the_attention_asked_for(tmp_path, attention):
    model = load(tiny_folder(tmp_path), attention=attention)
    assert model.config._attn_implementation == attention
