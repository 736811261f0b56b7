"""Tiny random models with a byte-level BPE tokenizer, built where a test needs them."""

from pathlib import Path

import torch
from tests.support.tiny_tokenizer import byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `tiny_tokenizer.py` as transformers has it."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")


def tiny_config(kind: str = "llama", **changes: object) -> PreTrainedConfig:
    shape = {**SHAPE, **changes}
    if kind == "llama":
        return LlamaConfig(tie_word_embeddings=True, **shape)
    if kind == "qwen2":
        return Qwen2Config(tie_word_embeddings=False, **shape)
    if kind == "mistral":
        return MistralConfig(tie_word_embeddings=False, **shape)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(tie_word_embeddings=False, norm_topk_prob=True, **shape)
    return Qwen3Config(tie_word_embeddings=False, head_dim=16, **shape)


def tiny_folder(path: Path, kind: str = "llama", *, seed: int = 0, **changes: object) -> Path:
    """Save a random model and the tokenizer in Hugging Face's layout."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
