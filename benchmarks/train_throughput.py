"""Training throughput of Megatron's layouts on GPUs: random weights of real sizes, the same pairs for every method.

One process group measures one model and layout, every method in turn on the same pairs, and rank 0 adds the rows to
`benchmarks/results/train_throughput.json`:

    torchrun --nproc-per-node 2 benchmarks/train_throughput.py --model qwen3-8b --tensor 2 --methods reference,ours
    torchrun --nproc-per-node 2 benchmarks/train_throughput.py --model qwen3-30b-a3b --expert 2 --lora --methods reference,ours

`reference` is our re-creation of the reference's recipe: every micro batch padded to the step's longest prompt and
logits of the whole vocabulary at every token. `ours` is packed, with two rows of the vocabulary at the last tokens.
`--tokens` may name several budgets; `--recompute` turns recomputation on for all methods.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from record import RESULTS, row, write_rows
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.model_shape import ModelShape
from tevatron.core.nn.forward import YesNoHead
from tevatron.trainer.program.backends.megatron.engine import Engine
from tevatron.trainer.program.backends.megatron.model import build_model
from tevatron.trainer.program.backends.megatron.optimizer import make_optimizer
from tevatron.trainer.program.backends.megatron.parallel import Ranks, check_layout, join_ranks
from tevatron.trainer.program.data.groups import Group
from tevatron.trainer.program.settings import RankEnvironment

PEAK_FLOPS = 795e12
"""bf16 FLOP/s of an H200 as measured by a large matrix product, which the shares refer to."""
VOCAB = 151936
HEAD = YesNoHead(yes=9834, no=902)

_QWEN3 = {
    "vocab_size": VOCAB,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}


def model_config(name: str) -> PreTrainedConfig:
    """Return the published shape of that name."""
    if name == "qwen3-30b-a3b":
        return Qwen3MoeConfig(
            **{**_QWEN3, "num_key_value_heads": 4, "architectures": ["Qwen3MoeForCausalLM"]},
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        )
    sizes = {
        "qwen3-tiny": (256, 512, 4, 8),
        "qwen3-0.6b": (1024, 3072, 28, 16),
        "qwen3-4b": (2560, 9728, 36, 32),
        "qwen3-8b": (4096, 12288, 36, 32),
    }
    hidden, ffn, layers, heads = sizes[name]
    return Qwen3Config(
        **_QWEN3,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )


def make_groups(num_queries: int, *, group_size: int, seed: int) -> list[Group]:
    """Return queries whose prompts have log-normal lengths: mean 167 tokens, longest 512."""
    draw = random.Random(seed)
    groups = []
    for _ in range(num_queries):
        lengths = [
            min(512, max(24, round(draw.lognormvariate(4.97, 0.5)))) for _ in range(group_size)
        ]
        prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]
        groups.append(Group(prompts=prompts, teacher=None, num_groups=num_queries, num_truncated=0))
    return groups


def full_logits(head: YesNoHead, **given: object) -> torch.Tensor:
    """Score as the reference does: the whole vocabulary at every token, then one token's two numbers."""
    logits_SBV, _ = given["output_layer"](given["hidden_states"], weight=given["output_weight"])
    # The reference reads local columns, which is wrong at TP > 1; here the shards are put together.
    logits_PV = gather_from_tensor_model_parallel_region(
        logits_SBV.flatten(0, 1).index_select(0, given["context"]).float()
    )
    return logits_PV[:, head.yes] - logits_PV[:, head.no]


def make_engine(args: argparse.Namespace, ranks: Ranks, arguments: TrainArguments) -> Engine:
    """Build the model with random weights."""
    bridge = AutoBridge.from_hf_config(model_config(args.model))
    model = build_model(bridge, arguments, ranks, load_weights=False)
    return Engine.of(
        model,
        make_optimizer(model, arguments),
        ranks,
        arguments=arguments,
        head=HEAD,
        softcap=None,
    )


def measure(args: argparse.Namespace, engine: Engine, *, method: str) -> dict[str, float]:
    """Time steps on the replica's pairs; returns medians over the timed ones, the warm-up left out."""
    ranks = engine.ranks
    steps = [
        make_groups(args.queries * ranks.layout.data, group_size=args.group_size, seed=number)[
            ranks.data_rank :: ranks.layout.data
        ]
        for number in range(args.warmup + args.steps)
    ]
    # Padding is no use: counted before it.
    useful_tokens = sum(
        len(prompt)
        for groups in steps[args.warmup :]
        for group in groups
        for prompt in group.prompts
    )
    if method == "reference":
        steps = [_padded_to_longest(groups) for groups in steps]
        object.__setattr__(engine, "scores", partial(full_logits, HEAD))
    times = []
    for number, groups in enumerate(steps):
        if number == args.warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        ranks.barrier()
        start = time.perf_counter()
        engine.step(groups, rate=1e-6)
        torch.cuda.synchronize()
        ranks.barrier()
        if number >= args.warmup:
            times.append(time.perf_counter() - start)
    pairs = args.queries * args.group_size * ranks.layout.data
    seconds = statistics.median(times)
    useful = 6 * ModelShape.of(model_config(args.model).to_dict()).num_active_params
    tokens_per_s = useful_tokens * ranks.layout.data / len(times) / seconds
    return {
        "pairs_per_s": pairs / seconds,
        "step_s": seconds,
        "share_of_peak": useful * tokens_per_s / ranks.layout.world / PEAK_FLOPS,
        "peak_gib": ranks.most(torch.cuda.max_memory_allocated()) / 2**30,
    }


def _padded_to_longest(groups: list[Group]) -> list[Group]:
    """Pad every prompt on the left to the step's longest, so that all micro batches are as wide as the reference's."""
    width = max(len(prompt) for group in groups for prompt in group.prompts)
    width = math.ceil(width / 16) * 16
    return [
        group._replace(prompts=[[0] * (width - len(one)) + one for one in group.prompts])
        for group in groups
    ]


def main() -> None:
    """Measure the methods asked for and add their rows to the results."""
    args = parse()
    environment = RankEnvironment.read()
    own = MegatronArguments(
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        expert_model_parallel_size=args.expert,
        moe_permute_fusion=args.permute_fusion,
    )
    shape = ModelShape.of(model_config(args.model).to_dict())
    layout = check_layout(own, shape, world=environment.world_size)
    ranks = join_ranks(layout, environment, seed=1)
    rows = []
    for method in args.methods.split(","):
        for tokens in args.tokens if method == "ours" else args.tokens[:1]:
            arguments = TrainArguments(
                dtype="bfloat16",
                packing=method == "ours",
                packing_max_tokens=tokens,
                per_device_train_batch_size=args.micro_batch,
                use_lora=args.lora,
                lora_target_groups=["attn", "moe_experts"]
                if args.lora and args.expert > 1
                else None,
                gradient_checkpointing=args.recompute,
                megatron=own,
            )
            engine = make_engine(args, ranks, arguments)
            found = measure(args, engine, method=method)
            kind = "LoRA" if args.lora else "full"
            how = (
                f"packed, {tokens} tokens a pass"
                if method == "ours"
                else f"padded, {args.micro_batch} queries a pass"
            )
            recompute = ", recompute" if args.recompute else ""
            recompute += ", permutation fused" if args.permute_fusion else ""
            rows.append(
                row(
                    name="train_throughput",
                    model=args.model,
                    layout=f"{layout}, {kind}, {how}{recompute}",
                    method=method,
                    value=round(found["pairs_per_s"], 1),
                    unit="pairs/s",
                    share_of_peak=round(found["share_of_peak"], 3),
                    peak_gib=round(found["peak_gib"], 1),
                    step_s=round(found["step_s"], 3),
                )
            )
            if ranks.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
            del engine
            torch.cuda.empty_cache()
    if ranks.rank == 0:
        _add(rows, gpus=f"{layout.world} x {torch.cuda.get_device_name()}")


def _add(rows: list[dict[str, object]], *, gpus: str) -> None:
    """Put the rows after those of other models and layouts that the file already has."""
    path = RESULTS / "train_throughput.json"
    before = json.loads(path.read_text()) if path.exists() else []
    packages = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers")
    written = json.loads(
        write_rows("train_throughput", rows, packages=packages, gpus=gpus).read_text()
    )
    places = {(entry["model"], entry["layout"], entry["method"]) for entry in written}
    kept = [one for one in before if (one["model"], one["layout"], one["method"]) not in places]
    path.write_text(json.dumps([*kept, *written], indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=Path(__file__).stem)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--expert", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--permute_fusion", action="store_true")
    parser.add_argument("--methods", default="reference,ours")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--micro_batch", type=int, default=4, help="queries a padded pass")
    parser.add_argument("--queries", type=int, default=16, help="a replica and step")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
