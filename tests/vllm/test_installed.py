"""Says by name that the tests of this folder are not run where vLLM is not installed."""

import importlib.util

import pytest


def test_vllm_is_installed():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")
