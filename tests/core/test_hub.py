import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.hub import model_folder


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such", "./no/such", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name):
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        model_folder(name)


def test_a_hub_that_does_not_answer_is_an_error_that_names_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="owner/name"):
        model_folder("owner/name", revision="0123456789abcdef")
