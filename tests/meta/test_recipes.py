"""Every recipe is a run that the API takes, with a layout that fits its model and the paper's 64 queries a step."""

from pathlib import Path

import pytest
from tests.core.test_model_shape import QWEN3_8B, QWEN3_30B_A3B

from tevatron.core.cli.specs import read_run_file
from tevatron.core.contracts.jobs import TrainJob
from tevatron.core.model_shape import ModelShape

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SHAPES = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_run(path: Path):
    (job,) = read_run_file(path).jobs.jobs.values()
    assert isinstance(job, TrainJob)
    assert job.name == path.stem
    layout = job.arguments.megatron.layout(job.num_processes)
    layout.check(ModelShape.of(SHAPES[str(job.model)]))
    arguments = job.arguments
    size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert size * layout.data == 64
    assert "# Aims at: " in path.read_text()


def test_there_are_recipes():
    assert len(RECIPES) == 6
