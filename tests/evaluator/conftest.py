"""Published data beside the repository: tests that read it skip by name where it is absent."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = os.environ.get("TEVATRON_SHARED_DATA") or str(
        Path(__file__).parents[3] / "shared" / "data"
    )
    if not Path(folder, "scifact").is_dir():
        pytest.skip(f"no published data at {folder}: set TEVATRON_SHARED_DATA")
    return Path(folder)
