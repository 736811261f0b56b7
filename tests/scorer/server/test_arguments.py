import logging
from dataclasses import fields
from pathlib import Path

import pytest

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.scorer.engines import ENGINES, EngineFlags
from tevatron.scorer.served import ServeOptions
from tevatron.scorer.server.arguments import Bind, parse


def test_the_references_command_is_read():
    command = "--backend hf --model m --prompt_template tevatron --score_mode yesno --rerank_max_len 512 --dtype bfloat16"
    assert parse([*command.split(), "--host", "127.0.0.1", "--port", "9"]) == (
        ServeOptions(
            backend="hf",
            model=Path("m"),
            prompt_template="tevatron",
            head=Head.YES_NO,
            max_length=512,
            dtype="bfloat16",
        ),
        Bind("127.0.0.1", 9, None),
    )


def test_what_is_not_given_is_left_to_the_contract():
    options, bind = parse(["--backend", "hf", "--model", "m"])
    assert options == ServeOptions(backend="hf", model=Path("m"))
    assert bind == Bind("0.0.0.0", 8100, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor_parallel_size 2", "--tensor_parallel_size is a flag.* not .*of hf"),
        ("--enforce_eager", "--enforce_eager is a flag.* not .*of hf"),
        ("--gpu_memory_utilization 0.5", "--gpu_memory_utilization is a flag.* not .*of hf"),
        (
            "--trust_remote_code",
            "--trust_remote_code is not supported: no code of a model folder is ever run",
        ),
        ("--device_map auto", "--device_map is not supported"),
        ("--max_batch_tokens 0", "--max_batch_tokens must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--backend", "hf", "--model", "m", *flags.split()])


def test_flags_of_the_engine_reach_it():
    command = "--backend hf --model m --device cpu --max_batch_tokens 4096 --compile"
    options, _ = parse([*command.split(), "--lora_name_or_path", "a"])
    assert options.flags == EngineFlags(device="cpu", max_batch_tokens=4096, compile=True)
    assert options.adapter == Path("a")


def test_help_offers_what_exists_and_nothing_else(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert f"--backend {{{','.join(ENGINES)}}}" in text
    assert "fake" not in text
    for name in ("trust_remote_code", "device_map", "top_logprobs", "hf_batch_size", "--fd"):
        assert name not in text
    honoured = {name for entry in ENGINES.values() for name in entry.honours}
    for field in fields(EngineFlags):
        assert (f"--{field.name}" in text) == (field.name in honoured)


def test_an_engine_that_does_not_exist_is_no_choice(capsys):
    with pytest.raises(SystemExit):
        parse(["--backend", "fake", "--model", "m"])
    assert "invalid choice: 'fake'" in capsys.readouterr().err


def test_flags_without_effect_warn(caplog):
    with caplog.at_level(logging.WARNING):
        parse(
            [
                "--backend",
                "hf",
                "--model",
                "m",
                "--hf_batch_size",
                "64",
                "--top_logprobs",
                "20",
                "--attn_implementation",
                "flash_attention_2",
            ]
        )
    assert [record.getMessage() for record in caplog.records] == [
        "--attn_implementation has no effect: the engine brings its own attention",
        "--hf_batch_size has no effect: batches are made by tokens; see --max_batch_tokens",
        "--top_logprobs has no effect: the logits of both answers are read, whatever their rank",
    ]
