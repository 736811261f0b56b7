"""Says by name that the tests of this folder are not run where Megatron is not installed."""

import importlib.util

import pytest


def test_megatron_is_installed():
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron is not in this environment: make test-megatron")
