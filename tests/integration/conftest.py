"""One stack for all tests of this folder: what one of them kills is running again for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.live_stack import LiveStack, make_inputs, train_job


@pytest.fixture(scope="package")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="package")
def stack(inputs: Path) -> Iterator[LiveStack]:
    with LiveStack.running(inputs) as running:
        make_inputs(running, inputs)
        yield running


@pytest.fixture(scope="package")
def checkpoint(stack: LiveStack) -> str:
    """Train for two steps and return the id of the checkpoint."""
    job = stack.wait_succeeded(stack.submit(train_job()))
    assert job.result is not None
    return str(job.result["checkpoint_id"])
