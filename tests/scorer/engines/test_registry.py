from dataclasses import fields

import pytest

from tevatron.core.errors import ConfigError
from tevatron.scorer.engines import ENGINES, EngineFlags, get_engine


def test_an_unknown_engine_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"unknown engine 'hff'; there are: .*Did you mean 'hf'"):
        get_engine("hff")


def test_the_fake_engine_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="unknown engine 'fake'"):
        get_engine("fake")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_honours_flags_that_there_are(name):
    assert ENGINES[name].honours <= {field.name for field in fields(EngineFlags)}
