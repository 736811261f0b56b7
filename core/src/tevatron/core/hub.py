"""What comes from the Hugging Face hub and goes there: a model's folder, a dataset repository's files, a checkpoint.

Knows no model, no format.

HF_ENDPOINT names another hub, HF_TOKEN opens what is not public; both are the library's own.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tevatron.core.errors import ConfigError, TooLargeError

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
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

    with _refusals(f"model '{name_or_path}' is no folder here and"):
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=_MODEL_FILES))


def fetch_dataset(
    hub_id: str, *, revision: str, files: Sequence[str], folder: Path, max_bytes: int
) -> list[str]:
    """Fetch files of a dataset repository into a new folder, and return their names in the repository.

    Args:
        hub_id: Of the repository, owner/name.
        revision: Commit, tag or branch.
        files: Names, or patterns with `*`.
        folder: Holds nothing else afterwards.
        max_bytes: Of all of them together.

    Raises:
        ConfigError: The repository cannot be read, or has no such file.
        TooLargeError: They are larger than that; nothing is fetched then.
    """
    # Heavy, and of no use where datasets are files.
    from huggingface_hub import snapshot_download

    with _refusals(f"dataset '{hub_id}' at revision '{revision}'"):
        found = snapshot_download(
            hub_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[*files],
            local_dir=folder,
            dry_run=True,
        )
        if not found:
            raise ConfigError(
                f"dataset '{hub_id}' at revision '{revision}' has no file {' or '.join(files)}"
            )
        num_bytes = sum(file.file_size or 0 for file in found)
        if num_bytes > max_bytes:
            raise TooLargeError(
                f"dataset '{hub_id}': {num_bytes} bytes in {len(found)} files, over the limit of {max_bytes}"
            )
        snapshot_download(
            hub_id,
            repo_type="dataset",
            # A branch may have moved on meanwhile.
            revision=found[0].commit_hash,
            allow_patterns=[file.filename for file in found],
            local_dir=folder,
        )
    # The library's notes about what it has fetched.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return sorted(file.filename for file in found)


def send_model(folder: Path, repo_id: str, *, stale: Sequence[str]) -> str:
    """Push a folder to a model repository in one commit, and return the commit. Repeating it does no harm.

    Args:
        folder: The files.
        repo_id: Of the repository, owner/name; a new one is private, one that is there keeps its visibility.
        stale: Patterns of files that are removed where the folder has none of that name.

    Raises:
        ConfigError: It cannot be written, or the repository does not take every file.
    """
    # Heavy, and of no use where nothing is pushed.
    from huggingface_hub import HfApi

    with _refusals(f"model '{repo_id}'", "cannot be pushed to"):
        api = HfApi()
        api.create_repo(repo_id, private=True, exist_ok=True)
        pushed = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Checkpoint of Tevatron",
            delete_patterns=[*stale],
        )
        there = set(api.list_repo_files(repo_id, revision=pushed.oid))
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if left_out := files - there:
        # Its .gitignore; the library passes over what matches.
        raise ConfigError(
            f"model '{repo_id}' on the hub does not take {', '.join(sorted(left_out))}: its .gitignore names them"
        )
    return pushed.oid


@contextmanager
def _refusals(what: str, failed: str = "cannot be fetched from") -> Iterator[None]:
    """Turn whatever the hub, the network or the disk says into one sentence; no progress bars into a log."""
    # With the library alone.
    import httpx
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        # An upload says which file it was; what happened to it is the cause's word.
        reason = f"{error} {error.__cause__}" if type(error) is RuntimeError else error
        raise ConfigError(f"{what} {failed} the hub: {reason}") from error
