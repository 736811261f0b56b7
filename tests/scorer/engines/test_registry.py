import pytest

from tevatron.core.errors import ConfigError
from tevatron.scorer.engines import ENGINES, get_engine


def test_the_registry_lists_the_engines():
    assert sorted(ENGINES) == ["fake", "hf"]


def test_vllm_is_refused_with_a_sentence():
    with pytest.raises(ConfigError, match="this build has no vLLM engine yet"):
        get_engine("vllm")


def test_an_unknown_engine_lists_what_there_is():
    with pytest.raises(
        ConfigError, match=r"unknown engine 'hff'; there are: fake, hf\. Did you mean 'hf'"
    ):
        get_engine("hff")
