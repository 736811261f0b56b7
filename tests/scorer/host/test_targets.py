"""What the server of a row is started with."""

import sys
from pathlib import Path

import pytest
from tests.support.store import publish_checkpoint, submit, train_job

from tevatron.core.errors import ConfigError
from tevatron.core.store.models import Checkpoint
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget
from tevatron.scorer.host.targets import engines, interpreter, server_arguments


@pytest.fixture
def adapter(sessions, settings):
    """A checkpoint that holds an adapter alone, of the model `base`."""
    (job_id,) = submit(sessions, tune=train_job())
    with sessions.begin() as session:
        checkpoint_id = publish_checkpoint(session, job_id)
        row = session.get_one(Checkpoint, checkpoint_id)
        row.contract = {"base_model": "base"}
        folder = settings.data / row.path
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (settings.data / "models" / "base").mkdir(parents=True)
    return checkpoint_id, folder


def _arguments(sessions, settings, **target):
    with sessions.begin() as session:
        return server_arguments(session, ScorerTarget(**target), settings)


def test_a_checkpoint_of_whole_weights(sessions, settings, adapter):
    checkpoint_id, folder = adapter
    (folder / "config.json").write_text("{}")
    found = _arguments(sessions, settings, checkpoint_id=checkpoint_id, dtype="bfloat16")
    assert found == ["--backend", "hf", "--model", str(folder), "--dtype", "bfloat16"]


def test_an_adapter_is_served_on_its_base_model(sessions, settings, adapter):
    checkpoint_id, folder = adapter
    base = settings.data / "models" / "base"
    found = _arguments(sessions, settings, checkpoint_id=checkpoint_id)
    assert found[2:] == ["--model", str(base), "--lora_name_or_path", str(folder)]


def test_an_adapter_of_a_hub_model(sessions, settings, adapter):
    checkpoint_id, folder = adapter
    with sessions.begin() as session:
        session.get_one(Checkpoint, checkpoint_id).contract = {"base_model": "Qwen/Qwen3-0.6B"}
        ModelRepository(session).create(
            "small", key_id=None, hub_id="Qwen/Qwen3-0.6B", hub_revision="abc"
        )
    found = _arguments(sessions, settings, checkpoint_id=checkpoint_id)
    assert found[2:6] == ["--model", "Qwen/Qwen3-0.6B", "--revision", "abc"]
    assert found[6:] == ["--lora_name_or_path", str(folder)]


def test_an_adapter_whose_base_is_gone_is_named(sessions, settings, adapter):
    checkpoint_id, _ = adapter
    with sessions.begin() as session:
        session.get_one(Checkpoint, checkpoint_id).contract = {"base_model": "gone"}
    with pytest.raises(ConfigError, match="is an adapter of the model 'gone', which is not"):
        _arguments(sessions, settings, checkpoint_id=checkpoint_id)


def test_a_folder_that_is_not_there_is_named(sessions, settings, adapter):
    checkpoint_id, folder = adapter
    (folder / "adapter_config.json").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match=f"the folder of {checkpoint_id} is not there"):
        _arguments(sessions, settings, checkpoint_id=checkpoint_id)


def test_vllm_is_served_where_its_environment_is_named(settings):
    own = settings.model_copy(update={"vllm_python": Path("/env/bin/python")})
    assert "vllm" in engines(own)
    assert interpreter("vllm", own) == "/env/bin/python"
    assert interpreter("hf", own) == sys.executable
    assert "hf" in engines(settings)
