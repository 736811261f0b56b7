"""Compiled layers with this environment's torch, which is older than the other backends'."""

from pathlib import Path

import pytest
import torch
from tests.megatron.ranks import on_ranks
from tests.support.tiny_model import tiny_folder
from torch import nn

from tevatron.core.contracts.train import Head
from tevatron.core.nn.compiling import compile_layers
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.loading import load_model
from tevatron.core.nn.probing import PromptScorer


def scored(folder: Path) -> tuple[list[float], list[float]]:
    """Return the scores without compiled layers, and those of a pass that must not be compiled anew."""
    # What is compiled once, and what again, is decided before a C++ compiler would be called.
    nn.Module.compile = _traced
    model = load_model(folder, Head.YES_NO, dtype="float32", device="cpu")
    prompts = [list(range(5, 5 + length)) for length in range(1, 80)]
    expected = PromptScorer(model, YesNoHead(yes=290, no=20)).score(prompts)
    compile_layers(model)
    scorer = PromptScorer(model, YesNoHead(yes=290, no=20))
    scorer.score(prompts[:10])
    scorer.score(prompts[:37])
    with torch._dynamo.config.patch(error_on_recompile=True):
        scorer.score(prompts[20:70])
        return expected, scorer.score(prompts)


def _traced(self: nn.Module, *, dynamic: bool) -> None:
    self._compiled_call_impl = torch.compile(self._call_impl, dynamic=dynamic, backend="eager")


def test_passes_of_other_numbers_of_prompts_share_the_code(tmp_path: Path):
    # In a process of its own: the compiler starts threads of autograd, and no rank could be forked after that.
    ((expected, found),) = on_ranks(1, scored, tiny_folder(tmp_path / "model", "qwen3"))
    assert found == pytest.approx(expected, abs=1e-4)
