"""Unpacks the .zip of a BEIR folder: only the files that belong there, only under the folder given.

Nothing in an archive is trusted: names are rebuilt from checked parts, sizes are counted while they are written.
"""

from __future__ import annotations

import re
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from tevatron.core.errors import InputError, TooLargeError

MAX_MEMBERS = 10_000
WANTED = re.compile(
    r"(?:corpus\.jsonl|queries\.jsonl|qrels/[A-Za-z0-9][A-Za-z0-9._-]*\.tsv)(?:\.gz|\.zst)?"
)
CHUNK_BYTES = 2**20


def unpack_beir(archive: Path, folder: Path, *, max_bytes: int) -> None:
    """Write corpus, queries and qrels of `archive` into the new `folder`."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = _wanted_members(opened.infolist())
            folder.mkdir()
            left = max_bytes
            for name, member in members.items():
                left -= _extract(opened, member, folder / name, left)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: an encrypted member; NotImplementedError: an unknown compression.
        raise InputError(f"the content is not a .zip that can be read: {error}") from error


def _wanted_members(members: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    if len(members) > MAX_MEMBERS:
        raise InputError(f"the archive has {len(members)} members; expected {MAX_MEMBERS} at most")
    paths = {member.filename: _checked_path(member) for member in members}
    files = [path for member in members if not member.is_dir() for path in [paths[member.filename]]]
    prefix = _common_folder(files)
    wanted: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        path = paths[member.filename]
        if member.is_dir() or (prefix and path.parts[0] != prefix):
            continue
        name = str(path.relative_to(prefix)) if prefix else str(path)
        if WANTED.fullmatch(name):
            if name in wanted:
                raise InputError(f"the archive holds {name!r} twice")
            wanted[name] = member
    if not wanted:
        raise InputError("the archive holds no corpus.jsonl, queries.jsonl and qrels/<split>.tsv")
    return wanted


def _common_folder(files: list[PurePosixPath]) -> str | None:
    """Name the one folder around a BEIR data set, as its own archives have it."""
    corpora = [
        path for path in files if path.name.startswith("corpus.jsonl") and len(path.parts) <= 2
    ]
    if len(corpora) > 1:
        raise InputError(f"the archive holds more than one corpus: {corpora[0]} and {corpora[1]}")
    return corpora[0].parts[0] if corpora and len(corpora[0].parts) == 2 else None


def _checked_path(member: zipfile.ZipInfo) -> PurePosixPath:
    name = member.filename
    path = PurePosixPath(name)
    if (
        not name
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or ":" in name
        or "\0" in name
    ):
        raise InputError(f"the archive's member {name[:200]!r} leaves its folder")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise InputError(f"the archive's member {name[:200]!r} is a link")
    return path


def _extract(opened: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, left: int) -> int:
    target.parent.mkdir(exist_ok=True)
    written = 0
    with opened.open(member) as source, target.open("xb") as file:
        while chunk := source.read(CHUNK_BYTES):
            written += len(chunk)
            if written > left:
                raise TooLargeError("the archive's content is over the limit of an upload")
            file.write(chunk)
    return written


def remove(path: Path) -> None:
    """Remove a file or a folder, where it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
