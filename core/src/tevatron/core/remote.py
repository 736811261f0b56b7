"""Files and folders at URLs of any file system that fsspec has: s3://, gs://, abfs://, hf://, file://, ...

What opens them (AWS_ACCESS_KEY_ID, ...) is the file system's own; its package must be installed where it is used. Knows no
format. Only what lies under a prefix that the operator allows (TEVATRON_REMOTE_ROOTS) is read or written.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tevatron.core.errors import ConfigError, ForbiddenError, InputError, TooLargeError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_CHUNK_BYTES = 2**20
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def check_remote(url: str, roots: Sequence[str], *, field: str) -> None:
    """Refuse a URL that is malformed, or under none of the prefixes that the operator allows.

    Raises:
        InputError: It is no URL, or could leave its prefix.
        ForbiddenError: It is not allowed.
    """
    scheme, separator, path = url.partition("://")
    if not separator or not scheme.isalnum() or not path or not url.isprintable():
        raise InputError(f"{field}: expected a URL such as s3://bucket/folder, got {url[:200]!r}")
    # `::` chains file systems, a glob names several files; each could lead elsewhere.
    if "::" in url or any(mark in url for mark in " \\@?#*[]{}") or "//" in path.lstrip("/"):
        raise InputError(
            f"{field}: expected a URL of one place, without user, query or pattern, got {url[:200]!r}"
        )
    if ".." in unquote(unquote(path)).split("/"):
        raise InputError(f"{field}: expected a URL without '..', got {url[:200]!r}")
    if not any(url.startswith(f"{root.rstrip('/')}/") for root in roots):
        raise ForbiddenError(
            f"{field}: {url!r} is under none of the prefixes that the operator allows (TEVATRON_REMOTE_ROOTS)"
        )


def hub_repository(url: str, *, field: str) -> str | None:
    """Return the model repository that `hf://owner/name` names, None for a URL of another file system.

    Raises:
        InputError: It is a URL of the hub and names something else.
    """
    scheme, _, path = url.partition("://")
    if scheme != "hf":
        return None
    if not _REPOSITORY.fullmatch(path):
        raise InputError(
            f"{field}: expected a model repository of the hub, hf://owner/name, got {url[:200]!r}"
        )
    return path


def fetch_file(url: str, place: Path, *, max_bytes: int) -> None:
    """Copy one file to `place`, which must not be there.

    Raises:
        ConfigError: It cannot be read.
        TooLargeError: It is larger than `max_bytes`.
    """
    with _refusals(url, "read"):
        system, path = _open(url)
        if not system.isfile(path):
            raise ConfigError(f"{url}: expected a file, found {_what(system, path)}")
        _check_size(url, system.size(path) or 0, max_bytes)
        _copy(system, path, place, max_bytes=max_bytes, url=url)


def fetch_folder(url: str, patterns: Sequence[str], place: Path, *, max_bytes: int) -> None:
    """Copy the files of a folder whose relative names match a pattern to the new folder `place`.

    Raises:
        ConfigError: It cannot be read, or has no such file.
        TooLargeError: They are larger than `max_bytes` together.
    """
    with _refusals(url, "read"):
        system, top = _open(url)
        if not system.isdir(top):
            raise ConfigError(f"{url}: expected a folder, found {_what(system, top)}")
        found = {
            posixpath.relpath(path, top): int(info.get("size") or 0)
            for path, info in system.find(top, detail=True).items()
        }
        wanted = {
            name: size
            for name, size in found.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not wanted:
            raise ConfigError(f"{url}: has no file {' or '.join(patterns)}")
        _check_size(url, sum(wanted.values()), max_bytes)
        left = max_bytes
        for name in sorted(wanted):
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            left -= _copy(system, posixpath.join(top, name), target, max_bytes=left, url=url)


def send_folder(folder: Path, url: str, *, last: str) -> None:
    """Copy a folder to `url`; `last` is the file without which nobody takes it for whole. Repeating it does no harm.

    Raises:
        ConfigError: It cannot be written.
    """
    with _refusals(url, "written"):
        system, top = _open(url)
        # What an earlier attempt has left is not whole any more.
        whole = posixpath.join(top, last)
        if system.exists(whole):
            system.rm(whole)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.relative_to(folder).as_posix() == last)
        for path in files:
            target = posixpath.join(top, path.relative_to(folder).as_posix())
            system.makedirs(posixpath.dirname(target), exist_ok=True)
            with path.open("rb") as source, system.open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    # Of no use where everything lies on the shared volume.
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path)


def _what(system: AbstractFileSystem, path: str) -> str:
    return "something else" if system.exists(path) else "nothing"


def _check_size(url: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise TooLargeError(f"{url}: {num_bytes} bytes, over the limit of {max_bytes}")


def _copy(system: AbstractFileSystem, path: str, place: Path, *, max_bytes: int, url: str) -> int:
    """Copy a file and return its bytes; it may have grown since its size was asked, or have none to ask."""
    num_bytes = 0
    with system.open(path, "rb") as source, place.open("xb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            _check_size(url, num_bytes, max_bytes)
            sink.write(chunk)
    return num_bytes


@contextmanager
def _refusals(url: str, done: str) -> Iterator[None]:
    """Turn whatever the file system or the network says into one sentence."""
    try:
        yield
    except (ConfigError, TooLargeError):
        raise
    except ImportError as error:
        raise ConfigError(
            f"{url}: cannot be {done}: its file system needs a package: {error}"
        ) from error
    # Each file system has errors of its own; none of them is a fault of ours to hide.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError(f"{url}: cannot be {done}: {reason}") from error
