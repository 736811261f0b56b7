"""What becomes of the reference's flags that are no field of TrainArguments. Tables only."""

from __future__ import annotations

from pydantic import JsonValue

DEAD: dict[str, str] = {
    "global_batch_size": "the step takes per_device_train_batch_size x gradient_accumulation_steps x ranks queries",
    "freeze_backbone": "use --use_lora to train few weights",
    "use_megatron_fsdp": "use --fsdp full_shard",
    "dp_sharding_strategy": "use --fsdp shard_grad_op or full_shard",
    "overwrite_output_dir": "a run goes on from its newest state; use --resume false to begin again",
    "save_strategy": "states are saved every --save_steps steps and at the end",
    "save_safetensors": "weights are always written as safetensors",
    "cache_dir": "set HF_HOME to choose where the hub's files are kept",
    "dataset_cache_dir": "local files are read directly, nothing is cached",
}
"""Flags that the reference takes and ignores, or that have nothing to do here: a warning says what to use."""

REFUSED: dict[str, str] = {
    "deepspeed": "use --fsdp shard_grad_op (as ZeRO-2) or --fsdp full_shard (as ZeRO-3)",
    "fsdp_config": "use --fsdp shard_grad_op or --fsdp full_shard; layers are wrapped by themselves",
    "lora_name_or_path": "merge the adapter into its model and give that as --model_name_or_path",
    "tokenizer_name": "put the tokenizer into the model's folder, where its checkpoints need it too",
    "config_name": "the model's own config.json is used",
    "dataset_config": "give a local file as --dataset_path",
    "rerank_output_path": "score with the scorer or with an eval job",
    "q_max_len": "use --rerank_max_len, the length of the whole prompt",
    "p_max_len": "use --rerank_max_len, the length of the whole prompt",
    "query_max_len": "use --rerank_max_len, the length of the whole prompt",
    "passage_max_len": "use --rerank_max_len, the length of the whole prompt",
    "train_n_passages": "use --train_group_size",
    "project": "use --wandb_project, or set MLFLOW_EXPERIMENT_NAME",
}
"""Flags whose wish cannot be met; the sentence says what to use."""

FIXED: dict[str, tuple[str, ...]] = {
    "dataset_name": ("json",),
    "dataset_split": ("train",),
    "dataset_number_of_shards": ("1",),
    "dataset_shard_index": ("0",),
    "reranker_pooling": ("last",),
    "tensor_model_parallel_size": ("1",),
    "pipeline_model_parallel_size": ("1",),
    "expert_model_parallel_size": ("1",),
    "recompute_granularity": ("full",),
    "recompute_method": ("uniform",),
    "recompute_num_layers": ("1",),
}
"""Flags that are honoured with these values only, which are also what happens anyway."""

MEGATRON_DEAD: dict[str, str] = {
    "global_batch_size": "the step takes micro_batch_size x num_micro_batches x replicas queries",
    "freeze_backbone": "use --use_lora to train few weights",
}
"""As DEAD, for the megatron backend."""

TRANSLATED: dict[str, dict[str, dict[str, JsonValue]]] = {
    "reranker_model_type": {
        "sequence_classification": {"head": "seq_cls"},
        "causal": {"head": "yes_no"},
    },
    "bf16": {"true": {"dtype": "bfloat16"}, "false": {}},
    "fp16": {"true": {"dtype": "float16"}, "false": {}},
    "dp_sharding_strategy": {
        name: {"data_parallel_sharding_strategy": name}
        for name in ("optim", "optim_grads", "optim_grads_params")
    },
    "loss_kind": {"contrastive": {"loss": "contrastive"}, "distill": {"loss": "listwise_kl"}},
}
"""Flags whose values mean fields."""
