"""Random models of shapes that vLLM's kernels take on a CPU, and what transformers says of them."""

from pathlib import Path

import torch
from tests.support.tiny_model import tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tevatron.core.contracts.checkpoint import (
    CheckpointContract,
    Probe,
    TemplateContract,
    answer_ids_of,
    write_contract,
)
from tevatron.core.contracts.probes import renderable_probes
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer, get_template

MAX_LENGTH = 320
"""Longest prompt, and all the positions that the models have."""
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def config_of(kind: str) -> PreTrainedConfig:
    if kind == "llama":
        return LlamaConfig(**SHAPE, tie_word_embeddings=True)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False)
    return Qwen3Config(**SHAPE, tie_word_embeddings=False)


def save_model(path: Path, kind: str) -> Path:
    """Save a random model with the tiny tokenizer, in Hugging Face's layout."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def own_scores(folder: Path, prompts, ids) -> list[float]:
    """Return transformers' own scores in fp32, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for prompt in prompts:
        with torch.no_grad():
            logits = model(torch.tensor([list(prompt)])).logits[0, -1]
        scores.append(float(logits[ids.yes] - logits[ids.no]))
    return scores


def save_contract(folder: Path) -> Path:
    """Write a contract whose probes have transformers' own scores."""
    renderer = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=MAX_LENGTH)
    pairs = renderable_probes(renderer)
    prompts = [renderer.render(pair).ids for pair in pairs]
    scores = own_scores(folder, prompts, renderer.answer_ids)
    contract = CheckpointContract(
        template=TemplateContract.of(renderer),
        answer_ids=answer_ids_of(renderer),
        head=Head.YES_NO,
        max_length=MAX_LENGTH,
        dtype="float32",
        base_model="tiny",
        base_model_sha256=None,
        tokenizer_sha256=tokenizer_sha256(folder),
        training_data_sha256=None,
        arguments=None,
        code_version="0",
        probes=[
            Probe(query=pair.query, title=pair.title, text=pair.text, token_ids=ids, score=score)
            for pair, ids, score in zip(pairs, prompts, scores, strict=True)
        ],
    )
    write_contract(folder, contract)
    return folder
