"""What `score_throughput.py` scores: models of real shapes with random weights, a tokenizer, and pairs of real lengths.

The tokenizer is byte-level BPE as Qwen3's is, with 20,000 made-up words that are one token each behind a blank, so that
texts cost as much to tokenise as English does. Nothing is downloaded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 151936
_COMMON = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
}
_SIZES = {
    "qwen3-tiny": (64, 128, 2, 4),
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-4b": (2560, 9728, 36, 32),
    "qwen3-8b": (4096, 12288, 36, 32),
}
MODELS = (*_SIZES, "qwen3-30b-a3b")
_TEMPLATE_WORDS = ["passage", "Is", "the", "relevant", "to", "query", "yes", "no"]


class PairText(NamedTuple):
    """A query and a passage."""

    query: str
    text: str


def model_config(name: str) -> PreTrainedConfig:
    """Return the published shape of that name."""
    if name == "qwen3-30b-a3b":
        return Qwen3MoeConfig(
            **{**_COMMON, "num_key_value_heads": 4},
            vocab_size=VOCAB,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    hidden, ffn, layers, heads = _SIZES[name]
    is_tiny = name == "qwen3-tiny"
    return Qwen3Config(
        **{**_COMMON, **({"head_dim": 32, "num_key_value_heads": 2} if is_tiny else {})},
        vocab_size=81920 if is_tiny else VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=name in ("qwen3-0.6b", "qwen3-4b", "qwen3-tiny"),
    )


def make_model(name: str, folder: Path) -> Path:
    """Write a model of that shape with random weights in bf16, and the tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return folder
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if name == "qwen3-tiny" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # an engine in another process takes all that is free
    make_tokenizer().save_pretrained(folder)
    return folder


def words(number: int = 20_000) -> list[str]:
    """Return made-up words of four to eight letters, the same in every run."""
    draw = random.Random(1)
    found = dict.fromkeys(_TEMPLATE_WORDS)
    while len(found) < number:
        found["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 8)))] = None
    return list(found)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which each of `words` is one token behind a blank."""
    vocab = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["<|endoftext|>"] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in words():
        token = "Ġ"
        for letter in word:
            if token + letter not in vocab:
                merges.append((token, letter))
                vocab[token + letter] = len(vocab)
            token += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make_pairs(
    seed: int, *, queries: int, candidates: int, template_tokens: int
) -> list[list[PairText]]:
    """Return each query's candidates; prompts have log-normal lengths of mean 160 tokens, 512 at most."""
    draw = random.Random(seed)
    known = words()
    found = []
    for _ in range(queries):
        query = " ".join(draw.choices(known, k=draw.randint(5, 12)))
        room = template_tokens + len(query.split()) + 6  # its first word is behind no blank
        lengths = [
            min(505, max(room + 4, round(draw.lognormvariate(4.93, 0.5))))
            for _ in range(candidates)
        ]
        found.append(
            [PairText(query, " ".join(draw.choices(known, k=length - room))) for length in lengths]
        )
    return found
