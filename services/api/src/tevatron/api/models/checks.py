"""What a base model's folder must hold: weights that are only data, a tokenizer, and no code of its own.

Reads names, sizes and the small JSON files; loads no weights and imports no model library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from tevatron.api.roots import refuse_leaving_links
from tevatron.core.contracts.checkpoint import check_tokenizer, read_contract
from tevatron.core.contracts.tokenizers import TOKENIZER_NAME
from tevatron.core.errors import InputError

MAX_JSON_BYTES = 64 * 2**20
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def check_model_folder(folder: Path, roots: Sequence[Path]) -> None:
    """Refuse a folder that cannot be loaded safely, with a sentence that says what is missing."""
    if not folder.is_dir():
        raise InputError(
            f"path: expected a folder in Hugging Face's layout, got the file {folder.name!r}"
        )
    refuse_leaving_links(folder, roots)
    config = _read_json(folder / "config.json")
    _refuse_code(config, "config.json")
    for name in ("tokenizer_config.json", "processor_config.json"):
        if (folder / name).is_file():
            _refuse_code(_read_json(folder / name), name)
    if not (folder / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{folder.name}: no tokenizer; expected {TOKENIZER_NAME} (a fast tokenizer)"
        )
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder.name}: adapter_config.json beside a model, which would change its weights; expected merged weights"
        )
    _check_weights(folder)
    contract = read_contract(folder)
    if contract is not None:
        check_tokenizer(contract, folder)


def _read_json(path: Path) -> dict[str, JsonValue]:
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise InputError(f"{name}: no such file; expected a folder in Hugging Face's layout")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise InputError(f"{name}: {path.stat().st_size} bytes; expected {MAX_JSON_BYTES} at most")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: expected a JSON object, got {type(value).__name__}")
    return value


def _refuse_code(config: dict[str, JsonValue], name: str) -> None:
    if config.get("auto_map"):
        raise InputError(
            f"{name}: auto_map asks for remote code ({config['auto_map']!r}); only models that transformers knows are taken"
        )


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_shards(folder, _read_json(index))
        return
    if (folder / "model.safetensors").is_file():
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder.name}: weights only as pickle ({', '.join(pickles[:3])}), which can run code when loaded; "
            "expected model.safetensors"
        )
    raise InputError(
        f"{folder.name}: no weights; expected model.safetensors or model.safetensors.index.json"
    )


def _check_shards(folder: Path, index: dict[str, JsonValue]) -> None:
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(
            f"{folder.name}/model.safetensors.index.json: expected an object 'weight_map' with entries"
        )
    for shard in sorted({str(shard) for shard in weights.values()}):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(
                f"{folder.name}/model.safetensors.index.json: expected names of .safetensors files, got {shard!r}"
            )
        if not (folder / shard).is_file():
            raise InputError(
                f"{folder.name}: shard {shard} of model.safetensors.index.json is missing"
            )
