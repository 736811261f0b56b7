"""A tiny model and a small dataset, made once."""

import pytest
from tests.support.tiny_model import tiny_folder
from tests.trainer.program.training import write_dataset


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "train.jsonl")
