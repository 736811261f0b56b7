"""A dataset's content on its way in: streamed or fetched beside its place, checked whole, renamed, then the row.

A crash at any point leaves either no content and a dataset that still awaits it, or all of it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from tevatron.api.datasets.archive import remove, unpack_beir
from tevatron.api.datasets.checks import Inspection, inspect_dataset
from tevatron.core.contracts.resources import DatasetKind
from tevatron.core.errors import FormatError, InputError
from tevatron.core.hub import fetch_dataset
from tevatron.core.remote import fetch_file, fetch_folder
from tevatron.core.store.registered import HubSource

WRITE_BYTES = 2**20
DATASETS = "datasets"
"""Folder of the uploads below TEVATRON_DATA."""
BEIR_FILES = ["corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*"]
PART_PREFIX = ".upload-"
STALE_PART_S = 86400.0


class Upload:
    """One attempt at a dataset's content, in a folder of its own until it is whole."""

    def __init__(self, data: Path, *, kind: DatasetKind, max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._part = data / DATASETS / f"{PART_PREFIX}{secrets.token_hex(8)}"
        self._content = self._part / "content"

    async def receive(self, chunks: AsyncIterator[bytes]) -> None:
        """Write the body to disk as it comes."""
        await run_in_threadpool(self._part.mkdir, parents=True)
        with await run_in_threadpool((self._part / "received").open, "xb") as file:
            held: list[bytes] = []
            held_bytes = 0
            async for chunk in chunks:
                held.append(chunk)
                held_bytes += len(chunk)
                if held_bytes >= WRITE_BYTES:
                    await run_in_threadpool(file.writelines, held)
                    held, held_bytes = [], 0
            await run_in_threadpool(file.writelines, held)

    def unpack(self) -> None:
        """Make the content of what was received."""
        received = self._part / "received"
        if received.stat().st_size == 0:
            raise InputError("the content is empty")
        if self._kind is DatasetKind.BEIR:
            unpack_beir(received, self._content, max_bytes=self._max_bytes)
            received.unlink()
        else:
            received.rename(self._content)

    def fetch(self, hub: HubSource) -> None:
        """Make the content of what a repository of the hub holds."""
        fetched = self._part / "fetched"
        fetch_dataset(
            hub.hub_id,
            revision=hub.revision,
            files=BEIR_FILES if hub.file is None else [hub.file],
            folder=fetched,
            max_bytes=self._max_bytes,
        )
        (fetched if hub.file is None else fetched / hub.file).rename(self._content)

    def fetch_url(self, url: str) -> None:
        """Make the content of what lies at a URL."""
        self._part.mkdir(parents=True)
        if self._kind is DatasetKind.BEIR:
            fetch_folder(url, BEIR_FILES, self._content, max_bytes=self._max_bytes)
        else:
            fetch_file(url, self._content, max_bytes=self._max_bytes)

    def inspect(self) -> Inspection:
        """Read everything; the error names the file as the user knows it."""
        content = self._content
        try:
            return inspect_dataset(self._kind, content)
        except FormatError as error:
            raise _as_given(error, content) from error
        except InputError as error:
            raise InputError(str(error).replace(str(content), "content")) from error

    def publish(self, place: Path) -> None:
        """Bring the checked content to its place, durably."""
        for path in [self._content, *self._content.rglob("*")]:
            _sync(path)
        remove(place)  # of an upload whose row was never written
        place.parent.mkdir(parents=True, exist_ok=True)
        self._content.rename(place)
        _sync(place.parent)
        _sync(place.parent.parent)

    def discard(self) -> None:
        """Remove what is left of this attempt."""
        remove(self._part)


def remove_stale_parts(data: Path) -> None:
    """Remove uploads that a crash has left; a younger one may still be going on in another process."""
    for part in (data / DATASETS).glob(f"{PART_PREFIX}*"):
        if time.time() - part.stat().st_mtime > STALE_PART_S:
            remove(part)


def _as_given(error: FormatError, content: Path) -> FormatError:
    shown = error.path.replace(str(content), "content")
    where = f"{shown}:{error.line}" if error.line is not None else shown
    where = f"{where}: field '{error.field}'" if error.field else where
    message = str(error).replace(str(content), "content").removeprefix(f"{where}: ")
    return FormatError(message, path=shown, line=error.line, field=error.field)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
