"""What is sent of a dataset that the API cannot read where it lies: its file, or the archive of a BEIR folder."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tevatron.core.contracts.resources import DatasetKind
from tevatron.core.errors import ConfigError

BEIR_FILES = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")


@contextmanager
def content_of(path: Path, kind: DatasetKind) -> Iterator[Path]:
    """Give the file to send; an archive is there for the length of the block."""
    if kind is not DatasetKind.BEIR:
        if not path.is_file():
            raise ConfigError(f"{path}: expected a file to upload as a dataset of kind {kind}")
        yield path
        return
    files = [file for pattern in BEIR_FILES for file in sorted(path.glob(pattern))]
    if not files:
        raise ConfigError(
            f"{path}: expected a folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv"
        )
    with tempfile.TemporaryDirectory(prefix="tevatron-upload-") as work:
        archive = Path(work) / "content.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            for file in files:
                opened.write(file, file.relative_to(path))
        yield archive
