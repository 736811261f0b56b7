"""The command line of the server: the reference's flags, and what became of those that mean nothing here."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.core.prompts import TEMPLATES
from tevatron.scorer.engines import ENGINES, EngineFlags, get_engine
from tevatron.scorer.served import ServeOptions

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "attn_implementation": "the engine brings its own attention",
    "hf_batch_size": "batches are made by tokens; see --max_batch_tokens",
    "top_logprobs": "the logits of both answers are read, whatever their rank",
    "missing_fallback_logprob": "a score that is missing is an error, never a number",
}
_REFUSED = {
    "trust_remote_code": "no code of a model folder is ever run",
    "device_map": "a model must fit its devices here; see --device and --tensor_parallel_size",
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
        adapter=Path(given.lora_name_or_path) if given.lora_name_or_path else None,
        tokenizer=Path(given.tokenizer) if given.tokenizer else None,
        prompt_template=given.prompt_template,
        query_prefix=given.query_prefix,
        passage_prefix=given.passage_prefix,
        append_eos=True if given.append_eos_token else None,
        max_length=given.rerank_max_len,
        head=_HEADS[given.score_mode] if given.score_mode else None,
        dtype=given.dtype,
        flags=_engine_flags(given),
    )
    return options, Bind(given.host, given.port, given.fd)


def _engine_flags(given: argparse.Namespace) -> EngineFlags:
    """Return what is asked of the engine; a flag that this one does not honour is an error, not ignored."""
    values = {field.name: getattr(given, field.name) for field in fields(EngineFlags)}
    honours = get_engine(given.backend).honours
    for name, value in values.items():
        if value not in (None, False) and name not in honours:
            others = [f"--backend {other}" for other, one in ENGINES.items() if name in one.honours]
            whose = f" of {' and '.join(others)}, not" if others else ", not one"
            raise ConfigError(f"--{name} is a flag{whose} of {given.backend}")
        if type(value) is int and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    return EngineFlags(**values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.serve.server",
        description="Serve /score and /rerank.",
        allow_abbrev=False,
    )
    parser.add_argument("--backend", required=True, choices=list(ENGINES))
    parser.add_argument(
        "--model", required=True, help="folder in Hugging Face's layout, or a hub id"
    )
    parser.add_argument("--revision", help="commit, branch or tag of a hub id")
    parser.add_argument("--tokenizer", help="folder of the tokenizer; the model's when unset")
    parser.add_argument("--lora_name_or_path", help="folder of a PEFT adapter of the model")
    plain = parser.add_argument_group("of a model without a contract (reranker.json)")
    plain.add_argument("--prompt_template", choices=sorted(TEMPLATES))
    plain.add_argument("--query_prefix")
    plain.add_argument("--passage_prefix")
    plain.add_argument("--append_eos_token", action="store_true")
    plain.add_argument("--score_mode", choices=sorted(_HEADS))
    plain.add_argument("--rerank_max_len", type=int, help="longest prompt in tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    _add_engine_flags(parser)
    parser.add_argument("--host", default="0.0.0.0")  # the reference's default
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trust_remote_code", action="store_true", help=argparse.SUPPRESS)
    for name in (*_WITHOUT_EFFECT, "device_map"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `EngineFlags`; one that no engine here honours is read, to be refused by name."""
    helps = {
        "device": "cpu, cuda, cuda:1; a GPU where there is one",
        "max_batch_tokens": "tokens of one forward pass",
        "compile": "compile the model first",
        "tensor_parallel_size": "GPUs that one model is split over",
        "max_model_len": "longest sequence that the engine makes room for",
        "gpu_memory_utilization": "share of a GPU's memory that the engine takes",
        "max_num_seqs": "prompts in one pass",
        "enforce_eager": "run without CUDA graphs",
    }
    honoured = {name for entry in ENGINES.values() for name in entry.honours}
    for field in fields(EngineFlags):
        shown = helps[field.name] if field.name in honoured else argparse.SUPPRESS
        flag = f"--{field.name}"
        if field.type == "bool":
            parser.add_argument(flag, action="store_true", help=shown)
        else:
            kinds = {"str | None": str, "int | None": int, "float | None": float}
            parser.add_argument(flag, type=kinds[str(field.type)], help=shown)


def _check_others(given: argparse.Namespace) -> None:
    values = vars(given)
    for name, instead in _REFUSED.items():
        if values[name]:
            raise ConfigError(f"--{name} is not supported: {instead}")
    if given.lora_name_or_path and not get_engine(given.backend).loads_adapters:
        raise ConfigError(
            f"--lora_name_or_path: engine '{given.backend}' loads no adapters; publish merged weights with an export job"
        )
    for name, why in _WITHOUT_EFFECT.items():
        if values[name]:
            logger.warning("--%s has no effect: %s", name, why)
