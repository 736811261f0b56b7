"""The Hugging Face engine: the forward pass of training itself, packed, last token and two rows only."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.core.nn.checks import check_forward
from tevatron.core.nn.compiling import compile_layers
from tevatron.core.nn.graphs import Graphs, is_capturable
from tevatron.core.nn.loading import DTYPES, load_model, score_head
from tevatron.core.nn.probing import PromptScorer
from tevatron.scorer.engines.base import EngineInfo, EngineOptions

_PASS_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens of one pass where `--max_batch_tokens` does not say: more do not make it faster, and others would wait."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class HfEngine:
    """Loads a model folder with transformers and scores with `core.nn`."""

    def __init__(self, options: EngineOptions) -> None:
        device = torch.device(options.flags.device or _best_device())
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device '{device}' is asked for, but torch finds no GPU")
        dtype: Dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        budget = options.flags.max_batch_tokens or _PASS_TOKENS.get(device.type, 1024)
        ids = options.answer_ids
        head = score_head(options.head, yes=ids.yes if ids else None, no=ids.no if ids else None)
        if options.adapter is None:
            model = load_model(options.model, options.head, dtype=dtype, device=device)
        else:
            model = _with_adapter(options, options.adapter, dtype=dtype, device=device)
        if options.flags.compile:
            compile_layers(model)
        run = Graphs(model, max_tokens=budget) if is_capturable(model) else None
        self._scorer = PromptScorer(model, head, max_tokens=budget, run=run)
        self._info = EngineInfo(
            dtype=dtype,
            device=str(device),
            max_batch_tokens=budget,
            queues_calls=device.type == "cuda",
            vocab_size=model.config.get_text_config().vocab_size,
            versions={
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                **({"peft": version("peft")} if options.adapter else {}),
            },
        )

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, in the order given."""
        return self._scorer.score(token_ids)

    def info(self) -> EngineInfo:
        """Describe the engine."""
        return self._info


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _with_adapter(
    options: EngineOptions, adapter: Path, *, dtype: Dtype, device: torch.device
) -> PreTrainedModel:
    """Load the base model, put the adapter into its weights in fp32, and cast: half weights would swallow it."""
    # peft: of no use to who serves whole weights
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    names = _adapter_tensors(adapter)
    trains_score = any(name.endswith("score.weight") for name in names)
    if trains_score != (options.head is Head.SEQ_CLS):
        raise ConfigError(
            f"{adapter} {'trains' if trains_score else 'holds no'} 'score.weight': head '{options.head}' does not fit it"
        )
    base = load_model(
        options.model, options.head, dtype="float32", device="cpu", new_head=trains_score
    )
    try:
        config = PeftConfig.from_pretrained(str(adapter))
        config.inference_mode = True
        config.base_model_name_or_path = base.name_or_path  # PEFT warns of any other
        adapted = get_peft_model(base, config)
        weights = load_peft_weights(str(adapter), device="cpu")
        loaded: Any = set_peft_model_state_dict(adapted, weights)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the adapter in {adapter} does not fit {options.model}: {error}"
        ) from error
    # What PEFT does not find in the file stays as it was drawn, and scores like the base model.
    missing = [name for name in loaded.missing_keys if "lora_" in name or "modules_to_save" in name]
    if missing or loaded.unexpected_keys:
        raise ConfigError(
            f"the adapter in {adapter} does not fit {options.model}: {len(missing)} of its tensors are missing "
            f"{missing[:3]}, {len(loaded.unexpected_keys)} have no place {loaded.unexpected_keys[:3]}"
        )
    model = adapted.merge_and_unload()
    assert isinstance(model, PreTrainedModel)
    for parameter in model.parameters():
        # Not the buffers: rotary frequencies stay fp32 in a model that is loaded in half precision.
        parameter.data = parameter.data.to(DTYPES[dtype])
    nn.Module.to(model, device)
    model.train(False)
    check_forward(model, options.head)
    return model


def _adapter_tensors(adapter: Path) -> list[str]:
    path = adapter / ADAPTER_WEIGHTS
    if not path.is_file():
        found = ", ".join(sorted(one.name for one in adapter.iterdir()))
        raise ConfigError(f"{adapter} has no {ADAPTER_WEIGHTS}; there are {found}")
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
