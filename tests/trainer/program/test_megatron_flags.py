"""The reference's own Megatron command lines, and what each backend says of the other's flags."""

import pytest

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.train import LossName, TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.backends.hf.arguments import check_arguments
from tevatron.trainer.program.flags import parse

RUN = ["--model_name_or_path", "m", "--dataset_path", "d.jsonl", "--save_dir", "out"]


def megatron(*words: str, **defaults: str):
    return parse([*RUN, *words], backend="megatron", defaults=defaults)


def test_the_references_command_line_is_understood():
    parsed = megatron(
        *("--tensor_model_parallel_size", "2", "--expert_model_parallel_size", "8"),
        *("--micro_batch_size", "4", "--num_micro_batches", "2", "--max_seq_len", "512"),
        *("--use_lora", "--lora_rank", "16"),
        *("--lora_target_groups", "attn", "moe_experts", "moe_shared"),
        *("--recompute_enabled", "--recompute_granularity", "full"),
        *("--moe_aux_loss_coeff", "1e-6", "--grad_clip", "0.5", "--total_steps", "7"),
        *("--global_batch_size", "64", "--wandb_project", "p", "--no_packing"),
        dtype="bfloat16",
    )
    arguments = parsed.run.arguments
    assert parsed.run.backend == "megatron"
    assert str(parsed.run.output_dir) == "out"
    assert arguments.megatron == MegatronArguments(
        tensor_model_parallel_size=2, expert_model_parallel_size=8, moe_aux_loss_coeff=1e-6
    )
    assert arguments.lora_target_groups == ["attn", "moe_experts", "moe_shared"]
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
    assert (arguments.max_grad_norm, arguments.max_steps, arguments.lora_r) == (0.5, 7, 16)
    assert (arguments.gradient_checkpointing, arguments.packing) == (True, False)
    assert arguments.dtype == "bfloat16"
    assert (arguments.wandb_project, arguments.trackers) == ("p", ["wandb"])
    assert parsed.warnings == [
        "--global_batch_size has no effect: the step takes micro_batch_size x num_micro_batches x replicas queries",
    ]


def test_the_references_names_of_what_is_sharded_are_taken():
    parsed = megatron("--use_megatron_fsdp", "--dp_sharding_strategy", "optim_grads")
    assert parsed.run.arguments.megatron == MegatronArguments(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads"
    )
    assert parsed.warnings == []


def test_a_drivers_defaults_give_way_to_flags():
    parsed = megatron("--loss", "ranknet", loss="listwise_kl", dtype="bfloat16")
    assert parsed.run.arguments.loss is LossName.RANKNET


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor_model_paralel_size", "2"], "Did you mean 'tensor_model_parallel_size'"),
        (["--dp_sharding_strategy", "all"], "one of optim, optim_grads, optim_grads_params"),
        (["--dataset_split", "test"], "is not honoured by the megatron backend; it takes train"),
        (["--tensor_model_parallel_size", "0"], "greater than or equal to 1, got '0'"),
        (["--gradient_checkpointing_kwargs", "x"], "unknown flag of the megatron backend"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        megatron(*words)


def test_the_hf_backend_refuses_a_layout_in_a_config():
    arguments = TrainArguments(megatron=MegatronArguments(tensor_model_parallel_size=2))
    with pytest.raises(
        ConfigError,
        match="megatron: tensor_model_parallel_size is not honoured by the hf backend",
    ):
        check_arguments(arguments, num_ranks=2)


def test_a_config_of_the_other_backend_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(parse(RUN).run.model_dump_json())
    with pytest.raises(ConfigError, match="a run of the hf backend, this is the megatron backend"):
        parse([str(path)], backend="megatron")
