"""The command line of the server: the reference's flags, and what became of those that mean nothing here."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.core.prompts import TEMPLATES
from tevatron.scorer.engines import ENGINES
from tevatron.scorer.served import DEFAULT_BATCH_TOKENS, ServeOptions

logger = logging.getLogger(__name__)

_VLLM_ONLY = (
    "tensor_parallel_size",
    "max_model_len",
    "gpu_memory_utilization",
    "max_num_seqs",
    "top_logprobs",
    "missing_fallback_logprob",
)
_WITHOUT_EFFECT = {
    "attn_implementation": "the engine brings its own packed attention",
    "hf_batch_size": "batches are made by tokens; see --max_batch_tokens",
}
_REFUSED = {
    "lora_name_or_path": "publish merged weights with an export job",
    "trust_remote_code": "no code of a model folder is ever run",
    "device_map": "a model must fit one device here; see --device",
}
_HEADS = {"yesno": Head.YES_NO, "seqcls": Head.SEQ_CLS}


class Bind(NamedTuple):
    """Where to listen: an address, or a socket that the parent process has bound."""

    host: str
    port: int
    fd: int | None


def parse(argv: Sequence[str]) -> tuple[ServeOptions, Bind]:
    """Read the command line; a flag that cannot be honoured is a `ConfigError` that names it."""
    given = _parser().parse_args(argv)
    _check_others(given)
    options = ServeOptions(
        backend=given.backend,
        model=Path(given.model),
        revision=given.revision,
        tokenizer=Path(given.tokenizer) if given.tokenizer else None,
        prompt_template=given.prompt_template,
        query_prefix=given.query_prefix,
        passage_prefix=given.passage_prefix,
        append_eos=True if given.append_eos_token else None,
        max_length=given.rerank_max_len,
        head=_HEADS[given.score_mode] if given.score_mode else None,
        dtype=given.dtype,
        device=given.device,
        max_batch_tokens=given.max_batch_tokens,
    )
    return options, Bind(given.host, given.port, given.fd)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.serve.server", description="Serve /score.", allow_abbrev=False
    )
    parser.add_argument("--backend", required=True, choices=[*ENGINES, "vllm"])
    parser.add_argument(
        "--model", required=True, help="folder in Hugging Face's layout, or a hub id"
    )
    parser.add_argument("--revision", help="commit, branch or tag of a hub id")
    parser.add_argument("--tokenizer", help="folder of the tokenizer; the model's when unset")
    parser.add_argument(
        "--prompt_template", choices=sorted(TEMPLATES), help="of a model without a contract"
    )
    parser.add_argument("--query_prefix", help="of a model without a contract")
    parser.add_argument("--passage_prefix", help="of a model without a contract")
    parser.add_argument("--append_eos_token", action="store_true")
    parser.add_argument(
        "--score_mode", choices=sorted(_HEADS), help="of a model without a contract"
    )
    parser.add_argument("--rerank_max_len", type=int, help="longest prompt in tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", help="cpu, cuda, cuda:1; a GPU where there is one")
    parser.add_argument("--max_batch_tokens", type=int, default=DEFAULT_BATCH_TOKENS)
    parser.add_argument("--host", default="0.0.0.0")  # the reference's default
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--enforce_eager", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trust_remote_code", action="store_true", help=argparse.SUPPRESS)
    for name in (*_VLLM_ONLY, *_WITHOUT_EFFECT, "lora_name_or_path", "device_map"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _check_others(given: argparse.Namespace) -> None:
    values = vars(given)
    for name, instead in _REFUSED.items():
        if values[name]:
            raise ConfigError(f"--{name} is not supported: {instead}")
    if given.backend != "vllm":
        for name in (*_VLLM_ONLY, "enforce_eager"):
            if values[name]:
                raise ConfigError(f"--{name} is a flag of --backend vllm, not of {given.backend}")
    for name, why in _WITHOUT_EFFECT.items():
        if values[name]:
            logger.warning("--%s has no effect: %s", name, why)
    if given.max_batch_tokens < 1:
        raise ConfigError(f"--max_batch_tokens must be at least 1, got {given.max_batch_tokens}")
