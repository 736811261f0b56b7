"""The measuring processes of the training benchmark, on the CPU: every way that the GPU runs take is walked once."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import packed_scores
import train_hf
import train_megatron
from tests.megatron.ranks import on_ranks
from train_cases import Case, Measured

TINY = Case(
    backend="megatron",
    method="ours",
    model="qwen3-test",
    queries=2,
    group_size=2,
    micro_batch=1,
    tokens=512,
    warmup=1,
    steps=1,
)
TWO = replace(TINY, gpus=2)


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, method="reference"),
        replace(TWO, tensor=2),
        replace(TWO, tensor=2, method="reference"),
        replace(TWO, pipeline=2),
        replace(TWO, context=2),
        replace(TWO, lora=True, recompute=True),
        replace(TWO, fsdp="optim_grads_params", recompute=True),
    ],
    ids=lambda case: f"{case.label}, {case.method}",
)
def test_the_megatron_backend_is_timed(case: Case):
    found: list[Measured] = on_ranks(case.gpus, train_megatron.measure, case)
    assert [len(one.step_seconds) for one in found] == [1] * case.gpus
    assert found[0].figures(case)["value"] > 0


@pytest.mark.parametrize(
    "case",
    [
        replace(TWO, backend="hf"),
        replace(TWO, backend="hf", method="reference", recompute=True),
        replace(TINY, backend="hf", optimizer_step=False),
    ],
    ids=lambda case: f"{case.label}, {case.method}",
)
def test_the_hf_backend_is_timed(case: Case):
    found: list[Measured] = on_ranks(case.gpus, train_hf.measure, case)
    assert [len(one.step_seconds) for one in found] == [1] * case.gpus
    if case.gpus > 1:
        assert found[0].note == "each GPU holds 100% of the parameters"


def test_packed_scores_are_compared_with_padded_ones():
    ((fp32, padded, packed),) = on_ranks(1, packed_scores.measure, TINY)
    assert fp32 == pytest.approx(padded, abs=0.1)
    assert fp32 != padded
    assert packed == pytest.approx(padded, abs=0.1)


def test_a_step_is_profiled(tmp_path: Path):
    on_ranks(1, train_megatron.measure, replace(TINY, profile=str(tmp_path / "seen")))
    assert "aten::" in (tmp_path / "seen.0").read_text()
