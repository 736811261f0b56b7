import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape

DENSE = ModelShape(
    model_type="qwen3",
    num_layers=36,
    hidden=4096,
    ffn=12288,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab=151936,
    is_tied=False,
)
EXPERTS = ModelShape(
    model_type="qwen3_moe",
    num_layers=48,
    hidden=2048,
    ffn=768,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    vocab=151936,
    is_tied=False,
    num_experts=128,
    experts_per_token=8,
)


def test_replicas_are_what_the_other_axes_leave():
    layout = Layout(world=8, tensor=2, pipeline=2)
    layout.check(DENSE)
    assert layout.data == 2
    assert str(layout) == "TP=2 PP=2 DP=2"


def test_experts_take_no_ranks_of_their_own():
    layout = Layout(world=8, tensor=2, expert=8)
    layout.check(EXPERTS)
    assert (layout.data, layout.expert_data) == (4, 1)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (
            Layout(world=8, tensor=3),
            DENSE,
            r"tensor_model_parallel_size\(3\) \* pipeline_model_parallel_size\(1\) \* context_parallel_size\(1\) = 3 "
            "must divide the world of 8 ranks",
        ),
        (
            Layout(world=16, tensor=16),
            DENSE,
            r"tensor_model_parallel_size\(16\) must divide the model's 8 key-value heads",
        ),
        (
            Layout(world=5, pipeline=5),
            DENSE,
            r"pipeline_model_parallel_size\(5\) must divide the model's 36 layers",
        ),
        (
            Layout(world=2, expert=2),
            DENSE,
            r"expert_model_parallel_size: expected 1 for a dense model \(qwen3\), got 2",
        ),
        (
            Layout(world=6, expert=6),
            EXPERTS,
            r"expert_model_parallel_size\(6\) must divide the model's 128 experts",
        ),
        (
            Layout(world=4, expert=8),
            EXPERTS,
            r"expert_model_parallel_size\(8\) must divide the 4 ranks of a pipeline stage",
        ),
        (
            Layout(world=4, tensor=0),
            DENSE,
            "tensor_model_parallel_size: expected at least 1, got 0",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_numbers(layout, shape, message):
    with pytest.raises(ConfigError, match=message):
        layout.check(shape)
