"""The hash of a tokenizer: of what decides its ids, not of how the file is laid out.

Knows `tokenizer.json` as the tokenizers library writes it, and the few ways in which saving it again changes the file
without changing an id.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.errors import InputError

TOKENIZER_NAME = "tokenizer.json"
_DECIDING = ("normalizer", "pre_tokenizer", "post_processor", "model")
_OFFSETS_ONLY = frozenset({"trim_offsets"})


def tokenizer_sha256(folder: Path | str) -> str:
    """Hash vocabulary, merges, normalizer, pre-tokenizer, post-processor and added tokens of a folder's tokenizer."""
    document = _read(Path(folder))
    deciding: dict[str, JsonValue] = {key: _plain(document.get(key)) for key in _DECIDING}
    deciding["model"] = _plain_model(document.get("model"))
    deciding["post_processor"] = _plain_post_processor(deciding["post_processor"])
    deciding["added_tokens"] = _plain_added(document.get("added_tokens"))
    text = json.dumps(deciding, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read(folder: Path) -> dict[str, JsonValue]:
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise InputError(
            f"model folder {folder} has no tokenizer: expected {TOKENIZER_NAME} (a fast tokenizer) in it"
        )
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a tokenizer: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise InputError(f"{path} is not a tokenizer: expected an object with the field 'model'")
    return document


def _plain(value: JsonValue) -> JsonValue:
    """Drop what moves offsets only, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if key not in _OFFSETS_ONLY}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value


def _plain_model(model: JsonValue) -> JsonValue:
    # Older files write a merge as "a b", newer ones as ["a", "b"], and leave out what is off.
    if not isinstance(model, dict):
        return model
    plain: dict[str, JsonValue] = {
        key: value for key, value in model.items() if value not in (None, False, "")
    }
    merges = model.get("merges")
    if isinstance(merges, list):
        joined: list[JsonValue] = [
            " ".join(map(str, merge)) if isinstance(merge, list) else merge for merge in merges
        ]
        plain["merges"] = joined
    return plain


def _plain_post_processor(processor: JsonValue) -> JsonValue:
    # A ByteLevel post-processor moves offsets and adds no token.
    if not isinstance(processor, dict):
        return processor
    if processor.get("type") == "ByteLevel":
        return None
    inner = processor.get("processors")
    if processor.get("type") == "Sequence" and isinstance(inner, list):
        kept: list[JsonValue] = [
            plain for plain in map(_plain_post_processor, inner) if plain is not None
        ]
        if len(kept) > 1:
            return {"type": "Sequence", "processors": kept}
        return kept[0] if kept else None
    return processor


def _plain_added(tokens: JsonValue) -> JsonValue:
    if not isinstance(tokens, list):
        return None
    ordered: list[JsonValue] = []
    ordered.extend(sorted(tokens, key=lambda token: json.dumps(token, sort_keys=True)))
    return ordered
