"""Tiny models, data and runs of the megatron backend, for its tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tests.megatron.ranks import on_ranks
from tests.support.tiny_model import SHAPE, tiny_folder, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.run import ExportRun, TrainRun
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.model_shape import ModelShape
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.loading import load_model as load_transformers
from tevatron.core.nn.probing import PromptScorer, prove
from tevatron.trainer.program.backends.megatron.engine import Engine
from tevatron.trainer.program.backends.megatron.model import load_model
from tevatron.trainer.program.backends.megatron.optimizer import make_optimizer
from tevatron.trainer.program.backends.megatron.parallel import check_layout, join_ranks
from tevatron.trainer.program.backends.megatron.run import train
from tevatron.trainer.program.data.groups import Group
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.export import export
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.train import write_config

HEAD = YesNoHead(yes=290, no=20)
"""At two tensor ranks these rows of 300 lie in different shards."""

PROMPTS = [list(range(5, 5 + length)) for length in (7, 12, 3, 10)]

Layout = tuple[int, int, int, int]
"""Ranks, TP, PP, EP."""


def model_folder(path: Path, kind: str, **changes: object) -> Path:
    """Save a random model of that kind and the tiny tokenizer."""
    if kind not in ("qwen3_moe", "mixtral", "gemma2", "gemma3"):
        return tiny_folder(path, kind, **changes)
    torch.manual_seed(0)
    if kind == "gemma2":
        config = Gemma2Config(head_dim=16, **{**SHAPE, **changes})
    elif kind == "gemma3":
        config = Gemma3TextConfig(head_dim=16, **{**SHAPE, **changes})
    elif kind == "mixtral":
        shape = {**SHAPE, **changes, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(tie_word_embeddings=False, **shape)
    else:
        shape = {**SHAPE, **changes, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        config = Qwen3MoeConfig(
            tie_word_embeddings=False, moe_intermediate_size=16, norm_topk_prob=True, **shape
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def groups(num_groups: int = 8, *, teacher: bool = False) -> list[Group]:
    """Return groups of four random prompts of 4 to 29 tokens."""
    draw = random.Random(0)
    return [
        Group(
            prompts=[[draw.randrange(256) for _ in range(draw.randrange(4, 30))] for _ in range(4)],
            teacher=[draw.uniform(-2, 2) for _ in range(4)] if teacher else None,
            num_groups=num_groups,
            num_truncated=0,
        )
        for _ in range(num_groups)
    ]


def arguments(layout: Layout = (1, 1, 1, 1), **changes: object) -> TrainArguments:
    """Return the arguments of a short fp32 run on this layout."""
    own = {
        "tensor_model_parallel_size": layout[1],
        "pipeline_model_parallel_size": layout[2],
        "expert_model_parallel_size": layout[3],
        "moe_aux_loss_coeff": 0.0,
        **changes.pop("megatron", {}),
    }
    values = {
        "train_group_size": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "packing_max_tokens": 128,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
    }
    return TrainArguments(**{**values, **changes}, megatron=MegatronArguments(**own))


def engine(folder: Path, options: TrainArguments) -> Engine:
    """Load the model on this rank."""
    environment = RankEnvironment.read()
    layout = check_layout(options.megatron, ModelShape.read(folder), world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=options.seed)
    model = load_model(folder, options, ranks)
    optimizer = make_optimizer(model, options)
    return Engine.of(model, optimizer, ranks, arguments=options, head=HEAD, softcap=None)


def num_trained(folder: Path, options: TrainArguments) -> int:
    """Return the number of parameters that this rank trains."""
    return sum(one.numel() for one in engine(folder, options).model.trainable().values())


def scores_and_steps(
    folder: Path, options: TrainArguments, num_steps: int, *, teacher: bool = False
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the scores of PROMPTS before training, then (loss, gradient norm) of each step."""
    made = engine(folder, options)
    scores = made.score(PROMPTS)
    own = groups(teacher=teacher)[made.ranks.data_rank :: made.ranks.layout.data]
    steps = [made.step(own, rate=1e-3) for _ in range(num_steps)]
    return scores, [(step.loss, step.grad_norm) for step in steps]


def write_data(path: Path, *, teacher: bool = False) -> Path:
    """Write twelve training rows."""
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]

    def text() -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randrange(3, 15)))

    def passage(number: int) -> dict[str, object]:
        one: dict[str, object] = {"docid": str(number), "title": "", "text": text()}
        return {**one, "score": draw.uniform(-2, 2)} if teacher else one

    rows = [
        {
            "query_id": str(number),
            "query": text(),
            "positive_passages": [passage(0)],
            "negative_passages": [passage(number) for number in range(1, 6)],
        }
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def whole_run(
    folder: Path, data: Path, out: Path, options: TrainArguments, held_out: Path | None = None
) -> None:
    """Train and publish on this rank, as the driver does."""
    environment = RankEnvironment.read()
    config = TrainRun(
        backend="megatron",
        model_name_or_path=str(folder),
        dataset_path=str(data),
        validation_path=None if held_out is None else str(held_out),
        output_dir=out,
        base_model="base",
        arguments=options,
    )
    if environment.rank == 0:
        write_config(config)
    train(config, environment, EventWriter(out, rank=environment.rank))


def events(out: Path, kind: str) -> list[dict[str, object]]:
    """Return what a run reported of that kind."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line["data"] for line in lines if line["type"] == kind]


def losses(out: Path) -> list[float]:
    """Return the losses of a run, from its events."""
    return [line["loss"] for line in events(out, "metrics") if "loss" in line]


def run(tmp_path: Path, kind: str, layout: Layout, **changes: object) -> Path:
    """Train on this layout; returns the run folder."""
    folder = tmp_path / kind
    if not folder.is_dir():
        model_folder(folder, kind)
    out = tmp_path / "run"
    out.mkdir(exist_ok=True)
    data = write_data(tmp_path / "data.jsonl")
    on_ranks(layout[0], whole_run, folder, data, out, arguments(layout, **changes))
    return out


def export_job(tmp_path: Path, name: str, *, step: int | None = None, form: str = "merged") -> Path:
    """Publish a state of `run`'s run as an export job does, in one process; returns the published folder."""
    config = ExportRun(run_dir=tmp_path / "run", output_dir=tmp_path / name, step=step, form=form)
    config.output_dir.mkdir()
    on_ranks(1, _exported, config)
    return config.output_dir / "export"


def _exported(config: ExportRun) -> None:
    export(config, EventWriter(config.output_dir, rank=0))


def largest_difference(published: Path) -> float:
    """Load a published folder in transformers; returns how far its probes are from the training model's."""
    contract = read_contract(published)
    head = YesNoHead(yes=contract.answer_ids.yes, no=contract.answer_ids.no)
    model = load_transformers(published, contract.head, dtype="float32", device="cpu")
    return prove(PromptScorer(model, head), contract, dtype="float32")
