"""The arithmetic behind the rows of the training benchmark, by hand."""

import json
from dataclasses import replace

import pytest
import train_throughput
from train_cases import (
    LONGEST,
    MODELS,
    PEAK_FLOPS,
    Case,
    Measured,
    make_queries,
    model_config,
    padded_to_longest,
)

from tevatron.core.model_shape import ModelShape

CASE = Case(backend="megatron", method="ours", model="qwen3-8b", gpus=2, tensor=2)


def test_a_case_survives_its_way_to_another_process():
    assert Case.from_json(CASE.to_json()) == CASE


@pytest.mark.parametrize(
    ("case", "label"),
    [
        (CASE, "TP=2 DP=1, full, packed, 16384 tokens a pass"),
        (replace(CASE, method="reference"), "TP=2 DP=1, full, padded, 4 queries a pass"),
        (replace(CASE, tensor=1, lora=True, recompute=True), "DP=2, LoRA, packed, 16384 tokens a pass, recompute"),
        (replace(CASE, backend="hf", tensor=1, fsdp="full_shard"), "hf, DP=2, FSDP2 full_shard, full, packed, 16384 tokens a pass"),
        (replace(CASE, backend="hf", tensor=1, fsdp="full_shard", method="reference"), "hf, DP=2, FSDP1 full_shard, full, padded, 4 queries a pass"),
        (replace(CASE, backend="hf", tensor=1), "hf, DP=2, DDP, full, packed, 16384 tokens a pass"),
        (
            Case(backend="hf", method="ours", model="qwen3-4b", optimizer_step=False),
            "hf, DP=1, one GPU, full, packed, 16384 tokens a pass, without optimizer step",
        ),
    ],
)  # fmt: skip
def test_the_label_says_layout_and_form(case: Case, label: str):
    assert case.label == label


def test_pairs_and_share_of_the_peak_are_of_the_median_step():
    """Two replicas with 16 x 8 pairs in 2 s are 128 pairs/s; 6 FLOPs a parameter and token, on each of 2 GPUs."""
    case = replace(CASE, tensor=1, steps=3)
    found = Measured(step_seconds=[9.0, 2.0, 1.0], peak_bytes=3 * 2**30, gpu="none").figures(case)
    tokens = sum(
        len(prompt)
        for number in (2, 3, 4)
        for query in make_queries(32, group_size=8, seed=number)
        for prompt in query
    )
    assert case.useful_tokens() == tokens
    flops = 6 * case.shape.num_active_params * tokens / 3 / 2.0
    assert found["value"] == 128.0
    assert found["share_of_peak"] == round(flops / 2 / PEAK_FLOPS, 3)
    assert (found["step_s"], found["peak_gib"]) == (2.0, 3.0)
    assert "note" not in found


def test_a_run_that_memory_was_not_enough_for_is_a_row_without_speed():
    measured = Measured(step_seconds=[], peak_bytes=2**37, gpu="H200", note="out of memory")
    row = train_throughput.to_row(replace(CASE, backend="hf", tensor=1), measured)
    assert (row["value"], row["note"], row["peak_gib"]) == (0.0, "out of memory", 128.0)


def test_every_method_gets_the_same_pairs():
    """Padding aside: the reference's rows end with ours."""
    ours, theirs = CASE.step_groups(), replace(CASE, method="reference").step_groups()
    for step, padded in zip(ours, theirs, strict=True):
        widths = {len(prompt) for query in padded for prompt in query}
        assert len(widths) == 1
        longest = max(len(prompt) for query in step for prompt in query)
        assert longest <= widths.pop() < longest + 16
        for query, rows in zip(step, padded, strict=True):
            assert [row[-len(prompt) :] for prompt, row in zip(query, rows, strict=True)] == query


def test_lengths_are_those_of_the_papers_data():
    lengths = [len(one) for query in make_queries(400, group_size=8, seed=0) for one in query]
    assert sum(lengths) / len(lengths) == pytest.approx(163, abs=5)
    assert max(lengths) == LONGEST


def test_padding_goes_to_a_multiple_of_sixteen():
    assert padded_to_longest([[[1, 2], [3]]]) == [[[0] * 14 + [1, 2], [0] * 15 + [3]]]


def test_the_largest_pass_is_counted_with_its_padding():
    small = replace(CASE, queries=2, group_size=2, warmup=0, steps=1, micro_batch=1)
    (step,) = small.step_groups()
    assert small.largest_pass() == sum(len(prompt) for query in step for prompt in query)
    longest = max(len(prompt) for query in step for prompt in query)
    width = -(-longest // 16) * 16
    assert replace(small, method="reference").largest_pass() == 2 * width


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.75), ("qwen3-4b", 4.41), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5)],
)
def test_the_shapes_are_the_published_ones(name: str, billions: float):
    """Untied, so that 0.6B and 4B have an output layer that the published ones share with the embedding."""
    found = ModelShape.of(model_config(name)).num_params / 1e9
    assert found == pytest.approx(billions, rel=0.01)
    assert name in MODELS


def test_flags_describe_cases_too():
    args = train_throughput.parse(
        ["--model", "qwen3-4b", "--gpus", "1", "--methods", "ours,reference", "--tokens", "1", "2"]
    )
    cases = train_throughput.cases_of(args)
    assert [(case.method, case.tokens) for case in cases] == [
        ("ours", 1),
        ("ours", 2),
        ("reference", 1),
    ]
    args = train_throughput.parse(["dense", "single", "--only", "0", "7"])
    first, last = train_throughput.cases_of(args)
    assert (first.tensor, last.model) == (2, "qwen3-4b")


def test_a_row_takes_the_place_of_the_same_case_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(train_throughput, "RESULTS", tmp_path)
    row = {"model": "m", "layout": "l", "method": "ours", "value": 1.0}
    train_throughput.add(row, gpus="none")
    train_throughput.add({**row, "method": "reference"}, gpus="none")
    train_throughput.add({**row, "value": 2.0}, gpus="none")
    rows = json.loads((tmp_path / "train_throughput.json").read_text())
    assert [(one["method"], one["value"]) for one in rows] == [("reference", 1.0), ("ours", 2.0)]
    assert {"machine", "versions", "date", "command", "gpus"} <= rows[0].keys()


def test_an_unknown_set_is_refused_with_those_there(capsys):
    with pytest.raises(SystemExit):
        train_throughput.parse(["denes"])
    assert "no set of cases 'denes'; there are dense, sharded" in capsys.readouterr().err


def test_every_case_of_the_sets_can_be_cut_that_way():
    for cases in train_throughput.SETS.values():
        for case in cases:
            case.layout.check(case.shape)
