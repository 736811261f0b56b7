"""The vLLM engine: one generated token a prompt, of which the raw logits of the two answers are read.

A request with `logprob_token_ids` and `raw_logits` gives both logits for any causal model and any tensor parallelism,
whatever their rank; a seq_cls head is refused. vLLM's processes live as long as this one and the thread that loads the
engine, and this process ends when one of them does: nothing that is left of it could score.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, InputError, TevatronError
from tevatron.core.nn.loading import check_weights, read_config
from tevatron.core.prompts import AnswerIds
from tevatron.scorer.engines.base import EngineInfo, EngineOptions

_HAS_GPU = torch.cuda.is_available()
_DEVICE = "cuda" if _HAS_GPU else "cpu"

# vLLM is configured by variables, and reads some of them as it is imported.
for _name, _value in {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The model is a folder here, whatever it was fetched from.
    "HF_HUB_OFFLINE": "1",
    # Its log goes where ours goes.
    "VLLM_CONFIGURE_LOGGING": "0",
    # A fork of a process with threads may hang; and a forked process would not run our plugin again.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # On a CPU the first prompts would wait for a C++ compiler, which need not be there.
    **({} if _HAS_GPU else {"TORCH_COMPILE_DISABLE": "1"}),
}.items():
    os.environ.setdefault(_name, _value)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm import __version__ as vllm_version  # noqa: E402
from vllm.v1.engine import EngineCoreOutput  # noqa: E402

from tevatron.scorer.engines.vllm_steps import Steps  # noqa: E402

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 2**30
"""Keys and values on a CPU; vLLM would take nearly all memory of the machine."""


class MissingTokenError(TevatronError):
    """vLLM gave no logit for an answer."""

    code = "engine_failed"


class VllmEngine:
    """Loads a model folder with vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        if options.head is not Head.YES_NO or options.answer_ids is None:
            raise ConfigError(
                f"engine 'vllm' serves head '{Head.YES_NO}', not '{options.head}'; use --backend hf"
            )
        if options.flags.device not in (None, _DEVICE):
            raise ConfigError(
                f"--device: vLLM runs on '{_DEVICE}' here, got '{options.flags.device}'; CUDA_VISIBLE_DEVICES chooses GPUs"
            )
        self._ids = options.answer_ids
        self._max_length = options.max_length
        self._dtype: Dtype = options.dtype or ("bfloat16" if _HAS_GPU else "float32")
        others = set(multiprocessing.active_children())
        self.llm = _load(options, self._dtype)
        _end_with(self, set(multiprocessing.active_children()) - others)
        config = self.llm.llm_engine.vllm_config
        if config.model_config.logprobs_mode != "raw_logits":
            raise AssertionError(f"logprobs_mode is {config.model_config.logprobs_mode}")
        self._pass_tokens = config.scheduler_config.max_num_batched_tokens
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            logprob_token_ids=[self._ids.yes, self._ids.no],
            detokenize=False,
        )
        self.steps = Steps(self.llm.llm_engine, params)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, in the order given."""
        prompts = [list(ids) for ids in token_ids]
        for prompt in prompts:
            # The core would wait for ever.
            if not 0 < len(prompt) <= self._max_length:
                raise InputError(
                    f"expected prompts of 1 to {self._max_length} tokens, got one of {len(prompt)}"
                )
        # Prompts of one query come one after the other, so that the cache still holds what they share.
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        outputs = self.steps.outputs([prompts[index] for index in order])
        scores = [0.0] * len(prompts)
        for index, output in zip(order, outputs, strict=True):
            scores[index] = _score(output, self._ids)
        return scores

    def info(self) -> EngineInfo:
        """Describe the engine."""
        return EngineInfo(
            dtype=self._dtype,
            device=_DEVICE,
            max_batch_tokens=self._pass_tokens,
            queues_calls=_HAS_GPU,
            vocab_size=self.llm.llm_engine.model_config.get_vocab_size(),
            versions={"vllm": vllm_version, "torch": str(torch.__version__)},
        )


def _load(options: EngineOptions, dtype: Dtype) -> LLM:
    flags = options.flags
    config = read_config(options.model)
    check_weights(options.model, config, options.head)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    # vLLM wants room for the generated token, which is never read.
    length = max(options.max_length + 1, flags.max_model_len or 0)
    if positions == options.max_length and length == positions + 1:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    size = flags.tensor_parallel_size or 1
    given: dict[str, float | str | None] = {
        "gpu_memory_utilization": flags.gpu_memory_utilization,
        "max_num_batched_tokens": flags.max_batch_tokens,
        "max_num_seqs": flags.max_num_seqs,
        # The GPUs of other nodes are reached through the Ray cluster that this node has joined; vLLM wants it said.
        "distributed_executor_backend": "ray"
        if _HAS_GPU and size > torch.cuda.device_count()
        else None,
    }
    if not _HAS_GPU and flags.gpu_memory_utilization is None:
        given["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    try:
        return LLM(
            model=str(options.model),
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",
            generation_config="vllm",
            dtype=dtype,
            # In half precision logits would be rounded to steps of an eighth, and candidates tie.
            hf_overrides={"head_dtype": "float32"},
            max_model_len=length,
            tensor_parallel_size=size,
            enforce_eager=flags.enforce_eager or not _HAS_GPU,
            enable_prefix_caching=True,
            logprobs_mode="raw_logits",
            max_logprobs=2,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot serve {options.model}: {error}") from error


def _score(output: EngineCoreOutput, ids: AnswerIds) -> float:
    """Return logit(yes) - logit(no) of a finished prompt."""
    logits: dict[int, float] = {}
    if output.new_logprobs is not None:
        tokens, values = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
        # One row for the one token that is generated: first itself, then those that were asked for.
        logits = dict(zip(tokens[0].tolist(), values[0].tolist(), strict=True))
    for answer, token in (("yes", ids.yes), ("no", ids.no)):
        if token not in logits:
            raise MissingTokenError(
                f"vLLM gave no logit for token {token}, the answer '{answer}': expected {ids.yes} and {ids.no}, got "
                f"{sorted(logits)}"
            )
    return logits[ids.yes] - logits[ids.no]


def _end_with(engine: VllmEngine, processes: set[BaseProcess]) -> None:
    """End this process as soon as one of vLLM's does, unless the engine is being closed."""
    if not processes:
        return
    alive, owner = weakref.ref(engine), threading.current_thread()

    def watch() -> None:
        ended = wait([process.sentinel for process in processes])
        # They are killed with the thread that made them, and ended with the engine itself.
        if alive() is None or not owner.is_alive():
            return
        names = [process.name for process in processes if process.sentinel in ended]
        logger.error("a process of vLLM ended: %s", ", ".join(names))
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="vllm-watch").start()
