"""From a model's name to its folder: one that is there, or one that is fetched from the hub. Knows no model."""

from __future__ import annotations

from pathlib import Path

from tevatron.core.errors import ConfigError

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""No pickled weights and no code."""


def model_folder(name_or_path: str, *, revision: str | None = None) -> Path:
    """Return the model's folder; what is no folder is a hub id, of which safetensors are fetched into the hub's cache.

    Raises:
        ConfigError: It is neither a folder nor a hub id, or cannot be fetched.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        raise ConfigError(f"model '{name_or_path}' is neither a folder nor a hub id (owner/name)")
    # Heavy, and of no use where models are folders.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model '{name_or_path}' is no folder here and cannot be fetched from the hub: {error}"
        ) from error
