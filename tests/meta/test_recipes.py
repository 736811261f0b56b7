"""Every recipe is a run that the API takes, with a layout that fits its model and the paper's 64 queries a step."""

from pathlib import Path

import pytest
from tests.core.test_model_shape import QWEN3_8B, QWEN3_30B_A3B

from tevatron.core.cli.specs import read_run_file
from tevatron.core.cli.study_table import rows_of
from tevatron.core.contracts.jobs import EvalJob, TrainJob
from tevatron.core.model_shape import ModelShape
from tevatron.evaluator.benchmarks import get_benchmark

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted({*FOLDER.glob("*.yaml")} - {*FOLDER.glob("study-*.yaml")})
SHAPES = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_run(path: Path):
    (job,) = read_run_file(path).jobs.jobs.values()
    assert isinstance(job, TrainJob)
    assert job.name == path.stem
    check_training(job)
    assert "# Aims at: " in path.read_text()


def check_training(job: TrainJob) -> None:
    """Check that its layout fits the model, and that a step has the paper's queries."""
    layout = job.arguments.megatron.layout(job.num_processes)
    layout.check(ModelShape.of(SHAPES[str(job.model)]))
    arguments = job.arguments
    size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert size * layout.data == 64


def test_there_are_recipes():
    assert len(RECIPES) == 6


def test_the_papers_grid_trains_what_the_recipes_do_and_evaluates_it_on_beir15():
    study = read_run_file(FOLDER / "study-paper.yaml").study
    assert study is not None
    trainings = {name: job for name, job in study.jobs.items() if isinstance(job, TrainJob)}
    assert len(trainings) == 2 * 2 * 2
    for job in trainings.values():
        check_training(job)
    for name, recipe in {
        "qwen3-8b-full-contrastive": "dense-8b-full",
        "qwen3-8b-lora-contrastive": "dense-8b-lora",
        "qwen3-8b-full-distill": "dense-8b-distill",
        "qwen3-30b-a3b-full-contrastive": "moe-30b-a3b-full",
        "qwen3-30b-a3b-lora-contrastive": "moe-30b-a3b-lora",
        "qwen3-30b-a3b-lora-distill": "moe-30b-a3b-distill",
    }.items():
        (wanted,) = read_run_file(FOLDER / f"{recipe}.yaml").jobs.jobs.values()
        assert isinstance(wanted, TrainJob)
        assert what_it_trains(trainings[name]) == what_it_trains(wanted), recipe
    evaluations = [job for job in study.jobs.values() if isinstance(job, EvalJob)]
    benchmark = get_benchmark("beir15")
    assert len(evaluations) == (1 + 8) * 3 * len(benchmark.datasets)
    assert {job.dataset for job in evaluations} == {one.name for one in benchmark.datasets}
    rows = rows_of(study)
    assert len(rows) == (1 + 8) * 3
    assert {len(row.jobs) for row in rows} == {15}


def what_it_trains(job: TrainJob) -> dict[str, object]:
    """Return what decides on the weights: all but the names, and of LoRA's fields none that is not used."""
    content = job.model_dump(exclude={"name"})
    arguments = content["arguments"]
    groups = arguments.pop("lora_target_groups")
    # The recipe names them; left out they are these on an MoE model, and attn and mlp on a dense one.
    assert groups in (None, ["attn", "moe_experts", "moe_shared"])
    if not job.arguments.use_lora:
        del arguments["lora_r"], arguments["lora_alpha"]
    return content
