"""The command line: aliases, dead flags, refusals, the JSON forms."""

import json

import pytest

from tevatron.core.contracts.train import Head, LossName, TrainArguments, aliases
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.flags import parse

BASE = ["--model_name_or_path", "m/tiny", "--dataset_path", "d.jsonl", "--output_dir", "out"]


def arguments(*words):
    return parse([*BASE, *words]).run.arguments


def test_the_defaults_are_those_of_the_fields():
    run = parse(BASE).run
    assert run.arguments == TrainArguments()
    assert run.base_model == "tiny"
    assert run.resume is True
    assert str(run.output_dir) == "out"


def test_flags_of_every_kind():
    got = arguments(
        "--train_group_size", "16", "--learning_rate=3e-5", "--gradient_checkpointing", "--packing", "false",
        "--lora_target_groups", "attn", "mlp", "--loss", "listwise_kl", "--max-steps", "7",
    )  # fmt: skip
    assert got.train_group_size == 16
    assert got.learning_rate == 3e-5
    assert got.gradient_checkpointing is True
    assert got.packing is False
    assert got.lora_target_groups == ["attn", "mlp"]
    assert got.loss is LossName.LISTWISE_KL
    assert got.max_steps == 7


@pytest.mark.parametrize(("alias", "name"), sorted(aliases().items()))
def test_every_alias_means_its_field(alias, name):
    value = "true" if TrainArguments.model_fields[name].annotation is bool else "33"
    assert getattr(arguments(f"--{alias}", value), name) == getattr(
        arguments(f"--{name}", value), name
    )


def test_an_alias_and_its_field_that_disagree():
    with pytest.raises(ConfigError, match="'rerank_max_len' '64', another flag says '32'"):
        arguments("--rerank_max_len", "32", "--max_seq_len", "64")


def test_the_references_spellings():
    got = arguments(
        "--reranker_model_type", "sequence_classification", "--bf16", "--lora",
        "--lora_target_modules", "q_proj,v_proj", "--save_dir", "out",
    )  # fmt: skip
    assert (got.head, got.prompt_template) == (Head.SEQ_CLS, "pair")
    assert got.dtype == "bfloat16"
    assert got.use_lora
    assert got.lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ["--global_batch_size", "32"],
            "per_device_train_batch_size x gradient_accumulation_steps",
        ),
        (["--freeze_backbone"], "--use_lora"),
        (["--use_megatron_fsdp"], "--fsdp full_shard"),
        (["--dp_sharding_strategy", "optim"], "--fsdp shard_grad_op"),
        (["--do_train"], "has no effect"),
    ],
)
def test_dead_flags_warn_and_say_what_to_use(words, advice):
    parsed = parse([*BASE, *words])
    assert parsed.run.arguments == TrainArguments()
    (warning,) = parsed.warnings
    assert words[0] in warning
    assert advice in warning


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deepspeed", "ds.json"], r"--deepspeed is not supported: use --fsdp shard_grad_op"),
        (["--lora_name_or_path", "x"], r"--lora_name_or_path is not supported: merge"),
        (["--train_n_passages", "8"], r"use --train_group_size"),
        (
            ["--report_to", "comet"],
            r"'report_to.0': Input should be 'wandb' or 'mlflow', got 'comet'",
        ),
        (
            ["--wandb_entity", "team"],
            r"wandb_entity 'team' needs wandb_project, or report_to 'wandb'",
        ),
        (["--project", "papers"], r"--project is not supported: use --wandb_project"),
        (["--eval_steps", "5"], r"command line: .*eval_steps 5 needs validation_path"),
        (["--validation_path", "held.jsonl"], r"validation_path is given, but eval_steps is 0"),
        (["--eval_strategy", "steps"], r"--eval_strategy is not honoured by the hf backend"),
        (["--tensor_model_parallel_size", "2"], r"--tensor_model_parallel_size 2 is not honoured"),
        (["--moe_z_loss_coeff", "1"], r"--moe_z_loss_coeff is a flag of the megatron backend"),
        (["--export_steps", "5"], r"--export_steps is a flag of the megatron backend"),
        (
            ["--export_form", "adapter"],
            r"command line: .*export_form 'adapter' needs use_lora and head 'yes_no', got use_lora False",
        ),
        (
            ["--dataset_name", "Tevatron/msmarco"],
            r"--dataset_name Tevatron/msmarco is not honoured.*json",
        ),
        (
            ["--reranker_model_type", "backbone"],
            r"must be one of sequence_classification, causal, got 'backbone'",
        ),
        (["--lerning_rate", "1"], r"unknown flag 'lerning_rate'.*Did you mean 'learning_rate'"),
        (["--train_group_size", "1"], r"'train_group_size': .*greater than or equal to 2, got '1'"),
        (["--packing", "perhaps"], r"--packing must be true or false, got 'perhaps'"),
        (["--seed", "1", "--seed", "2"], r"--seed is given twice"),
    ],
)
def test_what_is_not_honoured_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        parse([*BASE, *words])


def test_values_that_change_nothing_are_taken():
    words = [
        "--tensor_model_parallel_size",
        "1",
        "--dataset_name",
        "json",
        "--dataset_split",
        "train",
    ]
    assert parse([*BASE, *words]).warnings == []


def test_the_trainers_own_names_pass_through():
    parsed = parse([*BASE, "--dataloader_num_workers", "2", "--tf32", "true"])
    assert parsed.run.hf_arguments == {"dataloader_num_workers": 2, "tf32": True}


@pytest.mark.parametrize("backend", ["hf", "megatron"])
@pytest.mark.parametrize(
    ("words", "trackers"),
    [
        (["--report_to", "none"], []),
        (["--report_to", "tensorboard"], []),
        (["--report_to", "mlflow", "tensorboard", "wandb"], ["wandb", "mlflow"]),
        (["--report_to", "wandb,mlflow"], ["wandb", "mlflow"]),
        (["--wandb_project", "papers", "--wandb_entity", "team"], ["wandb"]),
        (["--wandb_project", "papers", "--report_to", "mlflow"], ["wandb", "mlflow"]),
        (["--wandb_run_name", "first"], []),
    ],
)
def test_where_the_metrics_go(words, trackers, backend):
    parsed = parse([*BASE, *words], backend=backend)
    assert parsed.run.arguments.trackers == trackers
    assert parsed.warnings == []


def test_the_references_name_of_a_run():
    assert arguments("--wandb_run_name", "first").run_name == "first"


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_path", "output_dir"])
def test_what_a_run_cannot_do_without(missing):
    place = BASE.index(f"--{missing}")
    with pytest.raises(ConfigError, match=f"--{missing} is required"):
        parse(BASE[:place] + BASE[place + 2 :])


def test_a_word_without_a_flag():
    with pytest.raises(ConfigError, match="got 'train'"):
        parse(["train", *BASE])


def test_a_flat_json_file(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(
        json.dumps(
            {
                "model_name_or_path": "m", "dataset_path": "d", "output_dir": "o", "bf16": True, "fp16": False,
                "train_group_size": 4, "lora_target_groups": ["attn"], "save_safetensors": True,
            }
        )
    )  # fmt: skip
    parsed = parse([str(path)])
    assert parsed.run.arguments.dtype == "bfloat16"
    assert parsed.run.arguments.train_group_size == 4
    assert parsed.run.arguments.lora_target_groups == ["attn"]
    assert not parsed.from_config


def test_a_runs_own_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(parse([*BASE, "--seed", "9"]).run.model_dump_json())
    parsed = parse([str(path)])
    assert parsed.from_config
    assert parsed.run.arguments.seed == 9


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected an object"),
        ('{"arguments": {}}', "'model_name_or_path'"),
    ],
)
def test_a_broken_json_file(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        parse([str(path)])
