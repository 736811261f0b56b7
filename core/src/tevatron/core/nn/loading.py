"""Loading a model folder so that it scores what its files say, or not at all.

Owns: safetensors only, no remote code, no quantized weights, no head that is not in the files, and a proof on loading
that the packed forward pass gives the logits of transformers' own. It knows nothing of prompts or contracts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.nn.attention import ATTENTION, register
from tevatron.core.nn.checks import check_forward, refuse_unsupported
from tevatron.core.nn.forward import ScoreHead, SeqClsHead, YesNoHead

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SCORE_WEIGHT = "score.weight"
TOKENIZER_FILE = "tokenizer.json"
ADAPTER_FILE = "adapter_config.json"

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TensorFacts(NamedTuple):
    """What a safetensors header says of one tensor."""

    shape: tuple[int, ...]
    file: str


def score_head(head: Head, *, yes: int | None = None, no: int | None = None) -> ScoreHead:
    """Return the head as the forward pass takes it; `yes_no` needs both answer ids."""
    if head is Head.SEQ_CLS:
        return SeqClsHead()
    if yes is None or no is None:
        raise ContractError(f"head '{head}' needs the ids of both answers, got yes={yes} no={no}")
    return YesNoHead(yes=yes, no=no)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, without remote code and without the network."""
    folder = _folder(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{folder} has no tokenizer: expected {TOKENIZER_FILE} beside the weights"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the libraries below raise anything, down to bare Exception; the file is the user's
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_model(
    folder: Path | str,
    head: Head,
    *,
    dtype: str,
    device: torch.device | str,
    attention: str = ATTENTION,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load the weights for this head and prove that they score as transformers' own forward pass does.

    `new_head` lets a causal checkpoint begin a `seq_cls` training with a fresh `score` row; nothing else is ever
    filled with random numbers.
    """
    folder = _folder(folder)
    config = load_config(folder)
    tensors = tensor_facts(folder)
    is_new = _check_head(folder, config, tensors, head, new_head=new_head)
    register()
    model = _from_pretrained(
        folder, head, dtype=dtype, allow_missing={SCORE_WEIGHT} if is_new else set()
    )
    nn.Module.to(model, torch.device(device))
    model.train(False)
    # Packed whatever the training does: probes and scorers are, and a model that cannot be is of no use in the end.
    check_forward(model, head)
    if attention != ATTENTION:
        check_forward(model, head, attention=attention)
    return model


def load_config(folder: Path | str) -> PreTrainedConfig:
    """Read and check config.json: a decoder that our forward pass computes, not quantized."""
    config = read_config(folder)
    refuse_unsupported(config)
    return config


def read_config(folder: Path | str) -> PreTrainedConfig:
    """Read config.json of an architecture that transformers knows, not quantized and without an adapter beside it."""
    folder = _folder(folder)
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {CONFIG_FILE}: expected a model folder in Hugging Face's layout"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if (folder / ADAPTER_FILE).exists():
        # transformers would put the adapter on the weights without a word.
        raise ConfigError(
            f"{folder} holds {ADAPTER_FILE} beside a model: which of the two is meant is not known; publish merged "
            "weights, or take the adapter out"
        )
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{path}: expected an object with 'model_type'")
    if raw.get("quantization_config"):
        raise ConfigError(f"{path}: quantized weights are not supported, got 'quantization_config'")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: model_type '{raw['model_type']}' cannot be loaded without remote code: {error}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def check_weights(folder: Path | str, config: PreTrainedConfig, head: Head) -> None:
    """Raise `ConfigError` where the safetensors are not whole, or not those of this head."""
    folder = _folder(folder)
    _check_head(folder, config, tensor_facts(folder), head, new_head=False)


def tensor_facts(folder: Path | str) -> dict[str, TensorFacts]:
    """Read names and shapes of all tensors out of the safetensors headers, not the tensors."""
    folder = _folder(folder)
    facts: dict[str, TensorFacts] = {}
    for name in _weight_files(folder):
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  not a mapping
                    facts[key] = TensorFacts(
                        shape=tuple(file.get_slice(key).get_shape()), file=name
                    )
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{folder / name} is not a whole safetensors file: {error}"
            ) from error
    return facts


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"}
    )
    found = f"; there are {', '.join(others)}, which are not loaded" if others else ""
    raise ConfigError(
        f"{folder} has no weights in safetensors: expected {WEIGHTS_FILE} or {INDEX_FILE}{found}"
    )


def _check_head(
    folder: Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, TensorFacts],
    head: Head,
    *,
    new_head: bool,
) -> bool:
    """Say whether a fresh `score` row is needed, or refuse the wrong kind of checkpoint."""
    has_score = SCORE_WEIGHT in tensors
    if head is Head.YES_NO:
        if has_score:
            raise ConfigError(
                f"{folder} holds '{SCORE_WEIGHT}', a seq_cls checkpoint; head 'yes_no' does not fit it"
            )
        tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        if not tied and not any(
            name.endswith("lm_head.weight") or name == "output.weight" for name in tensors
        ):
            raise ConfigError(
                f"{folder} holds no 'lm_head.weight': head 'yes_no' needs a causal language model"
            )
        return False
    if has_score:
        rows = tensors[SCORE_WEIGHT].shape[0]
        if rows != 1:
            raise ConfigError(f"{folder}: '{SCORE_WEIGHT}' has {rows} rows, head 'seq_cls' needs 1")
        return False
    if not new_head:
        raise ConfigError(
            f"{folder} holds no '{SCORE_WEIGHT}': head 'seq_cls' needs a checkpoint trained with it"
        )
    return True


def _from_pretrained(
    folder: Path, head: Head, *, dtype: str, allow_missing: set[str]
) -> PreTrainedModel:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got '{dtype}'")
    auto = AutoModelForCausalLM if head is Head.YES_NO else AutoModelForSequenceClassification
    extra = {} if head is Head.YES_NO else {"num_labels": 1}
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **extra,
        )
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"the weights in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    model, info = loaded
    missing = sorted(set(info["missing_keys"]) - allow_missing)
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise ConfigError(
            f"{folder} does not fill the model: {len(missing)} tensors are missing {missing[:5]}, "
            f"{len(mismatched)} have another shape {mismatched[:5]}"
        )
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        logger.warning(
            "%d tensors are not part of the model and are not loaded: %s", len(names), names[:5]
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _folder(folder: Path | str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    return folder
