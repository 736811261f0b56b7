"""What the plans of both backends count alike."""

from __future__ import annotations

from tevatron.core.contracts.plan import GIB
from tevatron.core.contracts.train import TrainArguments

WORKING_BYTES = GIB
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LORA_DENSE, LORA_MOE = ("attn", "mlp"), ("attn", "moe_experts", "moe_shared")
"""Groups that are adapted without a choice."""


def tokens_per_pass(arguments: TrainArguments) -> int:
    """Return the most tokens of one forward pass: the budget, or one query's longest prompts if these are more."""
    query = arguments.train_group_size * arguments.rerank_max_len
    if arguments.packing:
        return max(arguments.packing_max_tokens, query)
    return arguments.per_device_train_batch_size * query
