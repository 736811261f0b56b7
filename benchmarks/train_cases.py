"""What the training benchmark measures: cases, model shapes of published sizes, pairs and the arithmetic. No torch."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape
from tevatron.core.packing import pack, spread

PEAK_FLOPS = 795e12
"""bf16 FLOP/s of an H200 as measured by a large matrix product, which the shares refer to."""
VOCAB = 151936
YES, NO = 9834, 902
LONGEST = 512

_QWEN3: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_SIZES = {
    "qwen3-test": (64, 128, 2, 8),
    "qwen3-tiny": (256, 512, 4, 8),
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-4b": (2560, 9728, 36, 32),
    "qwen3-8b": (4096, 12288, 36, 32),
}
_EXPERTS: dict[str, dict[str, object]] = {
    "qwen3-moe-tiny": {
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "qwen3-30b-a3b": {
        "num_key_value_heads": 4,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
MODELS = (*_SIZES, *_EXPERTS)

Prompts = list[list[int]]
"""The prompts of one query."""


def model_config(name: str) -> dict[str, object]:
    """Return the config.json of the published shape of that name."""
    if name in _EXPERTS:
        return {
            **_QWEN3,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 6144,
            "norm_topk_prob": True,
            **_EXPERTS[name],
        }
    hidden, ffn, layers, heads = _SIZES[name]
    return {
        **_QWEN3,
        # Enough for the answers' ids; the whole vocabulary takes a CPU minutes.
        "vocab_size": 10240 if name == "qwen3-test" else VOCAB,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: what is trained, how, and for how many steps."""

    backend: str
    """megatron or hf."""
    method: str
    """ours or reference."""
    model: str
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    fsdp: str = ""
    """shard_grad_op or full_shard of the hf backend, which has DDP without; of Megatron-FSDP what is sharded."""
    lora: bool = False
    recompute: bool = False
    permute_fusion: bool = False
    compile: bool = False
    """Of the hf backend."""
    profile: str = ""
    """Start of the files, one a rank, for the kernels and calls of one more step; megatron only."""
    optimizer_step: bool = True
    tokens: int = 16384
    """Of a packed pass."""
    micro_batch: int = 4
    """Queries of a padded pass."""
    queries: int = 16
    """A replica and step."""
    group_size: int = 8
    warmup: int = 2
    steps: int = 4

    def to_json(self) -> str:
        """Return it as an argument for the process that measures it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read `to_json`'s text."""
        return cls(**json.loads(text))

    @property
    def packed(self) -> bool:
        """Whether prompts are packed: the reference pads."""
        return self.method == "ours"

    @property
    def layout(self) -> Layout:
        """How the GPUs are divided."""
        return Layout(
            world=self.gpus,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
        )

    @property
    def lora_groups(self) -> list[str] | None:
        """What LoRA adapts, the default on a dense model."""
        return ["attn", "moe_experts"] if self.lora and self.shape.num_experts else None

    @property
    def megatron(self) -> MegatronArguments:
        """The megatron backend's arguments."""
        return MegatronArguments(
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            expert_model_parallel_size=self.expert,
            context_parallel_size=self.context,
            moe_permute_fusion=self.permute_fusion,
            **self._sharding,
        )

    @property
    def _sharding(self) -> dict[str, object]:
        if not self.fsdp or self.backend == "hf":
            return {}
        return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": self.fsdp}

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return ModelShape.of(model_config(self.model))

    @property
    def label(self) -> str:
        """What the row says of layout and form."""
        parts = [str(self.layout)]
        if self.backend == "hf":
            # The paper's peer is FSDP1; the backend has FSDP2.
            version = 2 if self.method == "ours" else 1
            sharded = f"FSDP{version} {self.fsdp}"
            parts = [f"hf, DP={self.gpus}"]
            parts.append(sharded if self.fsdp else "DDP" if self.gpus > 1 else "one GPU")
        elif self.fsdp:
            parts.append(f"Megatron-FSDP {self.fsdp}")
        parts.append("LoRA" if self.lora else "full")
        parts.append(
            f"packed, {self.tokens} tokens a pass"
            if self.packed
            else f"padded, {self.micro_batch} queries a pass"
        )
        parts += ["recompute"] * self.recompute + ["permutation fused"] * self.permute_fusion
        parts += ["compiled"] * self.compile
        parts += ["without optimizer step"] * (not self.optimizer_step)
        return ", ".join(parts)

    def step_groups(self) -> list[list[Prompts]]:
        """Return all replicas' queries of each step, warm-up first; replica r has every DP-th from r on."""
        made = [self._queries(number) for number in range(self.warmup + self.steps)]
        return made if self.packed else [padded_to_longest(step) for step in made]

    def largest_pass(self) -> int:
        """Return the most tokens, padding included, that a timed step has in one pass of a replica."""
        found = []
        for step in self.step_groups()[self.warmup :]:
            for lengths in self._replicas([sum(map(len, query)) for query in step]):
                if self.packed:
                    bins = pack(lengths, max_tokens=self.tokens)
                    found += [sum(lengths[index] for index in one) for one in bins]
                else:
                    found.append(sum(lengths[: self.micro_batch]))
        return max(found)

    def _replicas(self, lengths: list[int]) -> list[list[int]]:
        """Divide a step's queries among the replicas, as the backend does it."""
        count = self.layout.data
        if self.packed and self.backend == "megatron":
            return [[lengths[at] for at in part] for part in spread(lengths, num_bins=count)]
        return [lengths[replica::count] for replica in range(count)]

    def useful_tokens(self) -> int:
        """Return the tokens of the timed steps, padding left out."""
        timed = range(self.warmup, self.warmup + self.steps)
        return sum(
            len(prompt) for number in timed for query in self._queries(number) for prompt in query
        )

    def _queries(self, seed: int) -> list[Prompts]:
        return make_queries(
            self.queries * self.layout.data,
            group_size=self.group_size,
            vocab=self.shape.vocab,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a process saw of its case."""

    step_seconds: list[float]
    """Of the timed steps."""
    peak_bytes: int
    """Of the fullest GPU, since the warm-up."""
    gpu: str
    note: str = ""
    """What is remarkable; without times, why there are none."""

    def figures(self, case: Case) -> dict[str, object]:
        """Return the row's numbers."""
        found: dict[str, object] = {"value": 0.0}
        if self.step_seconds:
            seconds = statistics.median(self.step_seconds)
            pairs = case.queries * case.group_size * case.layout.data
            tokens_per_s = case.useful_tokens() / case.steps / seconds
            flops = 6 * case.shape.num_active_params * tokens_per_s
            found = {
                "value": round(pairs / seconds, 1),
                "share_of_peak": round(flops / case.gpus / PEAK_FLOPS, 3),
                "step_s": round(seconds, 3),
                "largest_pass_tokens": case.largest_pass(),
            }
        found["peak_gib"] = round(self.peak_bytes / 2**30, 1)
        return {**found, "note": self.note} if self.note else found


def make_queries(
    num_queries: int, *, group_size: int, seed: int, vocab: int = VOCAB
) -> list[Prompts]:
    """Return queries whose prompts have log-normal lengths: mean 167 tokens, longest 512."""
    draw = random.Random(seed)
    queries = []
    for _ in range(num_queries):
        lengths = [
            min(LONGEST, max(24, round(draw.lognormvariate(4.97, 0.5)))) for _ in range(group_size)
        ]
        queries.append([[draw.randrange(vocab) for _ in range(length)] for length in lengths])
    return queries


def padded_to_longest(queries: Sequence[Prompts]) -> list[Prompts]:
    """Pad every prompt on the left to the step's longest, so that all micro batches are as wide as the reference's."""
    width = max(len(prompt) for query in queries for prompt in query)
    width = math.ceil(width / 16) * 16
    return [[[0] * (width - len(one)) + one for one in query] for query in queries]
