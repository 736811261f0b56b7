"""The Hugging Face engine against transformers' and PEFT's own logits, one prompt at a time."""

import random
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.support.tiny_model import SHAPE, tiny_folder, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
)

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.core.prompts import AnswerIds
from tevatron.scorer.engines import EngineFlags, EngineOptions, get_engine

IDS = AnswerIds(yes=259, no=261)
KINDS = ("qwen3", "llama", "qwen3_moe")


def _moe_folder(path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SHAPE,
        head_dim=16,
        tie_word_embeddings=False,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        kind: _moe_folder(root / kind) if kind == "qwen3_moe" else tiny_folder(root / kind, kind)
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(1)
    lengths = [1, 2, 300, *(draw.randint(3, 120) for _ in range(37))]
    return [[draw.randrange(300) for _ in range(length)] for length in lengths]


def _engine(folder, *, head=Head.YES_NO, adapter=None, dtype="float32", **flags):
    return get_engine("hf").make(
        EngineOptions(
            model=folder,
            adapter=adapter,
            head=head,
            answer_ids=IDS if head is Head.YES_NO else None,
            max_length=512,
            dtype=dtype,
            flags=EngineFlags(device="cpu", **flags),
        )
    )


def _own(model, prompts):
    """Score with the model's own forward pass, whole logits, one prompt at a time."""
    model.eval()
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1].float() for ids in prompts]
    return [float(one[IDS.yes] - one[IDS.no]) for one in logits]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_transformers_logits_in_any_batch_and_order(folders, prompts, kind):
    own = _own(AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32), prompts)
    assert max(own) - min(own) > 1
    assert _engine(folders[kind]).info().vocab_size == 300
    places = list(range(len(prompts)))
    for budget, seed in ((1, 0), (400, 1), (100_000, 2)):
        random.Random(seed).shuffle(places)
        got = _engine(folders[kind], max_batch_tokens=budget).score([prompts[at] for at in places])
        assert got == pytest.approx([own[at] for at in places], abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_fp32_and_tells_prompts_apart(folders, prompts, dtype):
    exact = _engine(folders["qwen3"]).score(prompts)
    engine = _engine(folders["qwen3"], dtype=dtype)
    half = engine.score(prompts)
    assert engine.info().dtype == dtype
    spread = torch.tensor(exact).std().item()
    assert max(abs(a - b) for a, b in zip(exact, half, strict=True)) < 0.2 * spread
    # Scores of the two rows are fp32: bf16 logits would tie.
    assert len(set(half)) == len(half)


def test_a_seq_cls_checkpoint_gives_its_heads_logit(tmp_path, folders, prompts):
    model = AutoModelForSequenceClassification.from_pretrained(folders["llama"], num_labels=1)
    model.config.pad_token_id = 299
    model.save_pretrained(tmp_path)
    prompts = [[*ids[:-1], 5] for ids in prompts]
    with torch.no_grad():
        own = [float(model.eval()(torch.tensor([ids])).logits[0, 0]) for ids in prompts]
    assert _engine(tmp_path, head=Head.SEQ_CLS).score(prompts) == pytest.approx(own, abs=1e-4)


def test_a_head_that_does_not_fit_the_checkpoint_is_refused(tmp_path, folders):
    with pytest.raises(ConfigError, match=r"holds no 'score\.weight': head 'seq_cls' needs"):
        _engine(folders["llama"], head=Head.SEQ_CLS)
    model = AutoModelForSequenceClassification.from_pretrained(folders["llama"], num_labels=1)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"holds 'score\.weight', a seq_cls checkpoint"):
        _engine(tmp_path)


def _adapter(folder, path, *, task="CAUSAL_LM", modules_to_save=None):
    """Save a LoRA adapter whose matrices are all random, and return the adapted model."""
    auto = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    extra = {} if task == "CAUSAL_LM" else {"num_labels": 1, "pad_token_id": 299}
    base = auto.from_pretrained(folder, dtype=torch.float32, **extra)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type=task,
        modules_to_save=modules_to_save,
    )
    adapted = get_peft_model(base, config)
    torch.manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(path)
    return adapted


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_adapter_is_put_onto_its_model(tmp_path, folders, prompts, kind):
    adapted = _adapter(folders[kind], tmp_path)
    own = _own(adapted, prompts)
    assert _engine(folders[kind], adapter=tmp_path).score(prompts) == pytest.approx(own, abs=1e-4)
    base = _engine(folders[kind]).score(prompts)
    assert max(abs(a - b) for a, b in zip(own, base, strict=True)) > 0.1


def test_an_adapter_with_a_score_head(tmp_path, folders, prompts):
    adapted = _adapter(folders["llama"], tmp_path, task="SEQ_CLS").eval()
    prompts = [[*ids[:-1], 5] for ids in prompts]
    with torch.no_grad():
        own = [float(adapted(torch.tensor([ids])).logits[0, 0]) for ids in prompts]
    engine = _engine(folders["llama"], head=Head.SEQ_CLS, adapter=tmp_path)
    assert engine.score(prompts) == pytest.approx(own, abs=1e-4)
    with pytest.raises(ConfigError, match=r"trains 'score\.weight': head 'yes_no' does not fit"):
        _engine(folders["llama"], adapter=tmp_path)


def test_an_adapter_without_a_score_head_is_no_seq_cls_checkpoint(tmp_path, folders):
    _adapter(folders["llama"], tmp_path)
    with pytest.raises(ConfigError, match=r"holds no 'score\.weight': head 'seq_cls'"):
        _engine(folders["llama"], head=Head.SEQ_CLS, adapter=tmp_path)


def test_an_adapter_with_missing_tensors_is_refused_and_not_ignored(tmp_path, folders):
    _adapter(folders["llama"], tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    renamed = {
        name.replace("layers.1.self_attn.q_proj", "layers.9.self_attn.q_proj"): one
        for name, one in tensors.items()
    }
    save_file(renamed, file)
    with pytest.raises(ConfigError, match=r"2 of its tensors are missing .* 2 have no place"):
        _engine(folders["llama"], adapter=tmp_path)


def test_an_adapter_of_another_shape_is_refused(tmp_path, folders):
    other = tiny_folder(tmp_path / "other", "llama", hidden_size=64)
    _adapter(other, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="does not fit"):
        _engine(folders["llama"], adapter=tmp_path / "adapter")


def test_a_pickled_adapter_is_refused(tmp_path, folders):
    _adapter(folders["llama"], tmp_path)
    shutil.move(tmp_path / "adapter_model.safetensors", tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; there are"):
        _engine(folders["llama"], adapter=tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own import
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++, which is absent")
def test_compiled_layers_give_the_same_scores_and_compile_once(folders, prompts):
    own = _engine(folders["qwen3"]).score(prompts)
    torch._dynamo.reset()
    engine = _engine(folders["qwen3"], compile=True, max_batch_tokens=500)
    assert engine.score(prompts) == pytest.approx(own, abs=1e-4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert engine.score(prompts[::-1]) == pytest.approx(own[::-1], abs=1e-4)


def test_a_gpu_that_is_not_there_is_named(folders):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="device 'cuda' is asked for, but torch finds no GPU"):
        get_engine("hf").make(
            EngineOptions(
                model=folders["llama"],
                head=Head.YES_NO,
                answer_ids=IDS,
                max_length=9,
                flags=EngineFlags(device="cuda"),
            )
        )
