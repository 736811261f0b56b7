"""What can be known to be wrong with a train job before a rank starts: the model's folder and the data.

Reads files only. Whatever needs the tokenizer or the model itself is checked by the program, before its first step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tevatron.core.contracts.checkpoint import check_tokenizer, read_contract
from tevatron.core.contracts.jobs import FailReason, Phase
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.errors import ContractError, FormatError, InputError, JobError
from tevatron.core.formats.training import read_training

_ROWS_BETWEEN_LOOKS = 1000
_INDEX_NAME = "model.safetensors.index.json"


def check_model(folder: Path) -> None:
    """Raise `JobError` unless the folder has a model's configuration, a tokenizer and safetensors weights."""
    try:
        _check_model(folder)
    except ContractError as error:
        raise JobError(
            str(error), reason=FailReason.CONTRACT_MISMATCH, phase=Phase.PREPARING
        ) from error
    except InputError as error:
        raise JobError(str(error), reason=FailReason.MODEL_ERROR, phase=Phase.PREPARING) from error


def check_dataset(path: Path, *, look: Callable[[], None]) -> int:
    """Read the whole training file and return its number of rows; raise `JobError` at the first broken one.

    Args:
        path: The training file.
        look: Called now and then, to end early by raising.
    """
    num_rows = 0
    try:
        for num_rows, _ in enumerate(read_training(path), 1):
            if num_rows % _ROWS_BETWEEN_LOOKS == 0:
                look()
        if num_rows == 0:
            raise FormatError("expected at least one row, got none", path=path)
    except OSError as error:
        message = f"dataset file {path} cannot be read: {error.strerror}"
        raise JobError(message, reason=FailReason.DATA_ERROR, phase=Phase.PREPARING) from error
    except InputError as error:
        raise JobError(str(error), reason=FailReason.DATA_ERROR, phase=Phase.PREPARING) from error
    return num_rows


def _check_model(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"model folder {folder} is not there")
    config = folder / "config.json"
    try:
        described = json.loads(config.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"model folder {folder} has no config.json") from error
    except ValueError as error:
        raise InputError(f"{config} is not JSON: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise InputError(f"{config}: field 'model_type' is missing")
    tokenizer_sha256(folder)
    contract = read_contract(folder)
    if contract is not None:
        check_tokenizer(contract, folder)
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    index = folder / _INDEX_NAME
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            others = sorted(path.name for path in folder.glob("*.bin"))
            instead = f", only {', '.join(others[:3])}" if others else ""
            raise InputError(f"model folder {folder} has no *.safetensors weights{instead}")
        return
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: field 'weight_map' is missing or broken") from error
    missing = sorted(shard for shard in shards if not (folder / str(shard)).is_file())
    if missing:
        raise InputError(
            f"model folder {folder} lacks {len(missing)} of {len(shards)} weight files: {missing[0]}"
        )
