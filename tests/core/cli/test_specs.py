"""From flags and files to specs; each mistake has its own message."""

from pathlib import Path

import pytest

from tevatron.core.cli.specs import (
    dataset_request,
    make_spec,
    merge_spec,
    model_request,
    read_run_file,
    train_arguments,
    train_flags,
)
from tevatron.core.contracts.jobs import AnnotateJob, EvalJob, From, JobKind, TrainJob
from tevatron.core.errors import ConfigError, FormatError

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_training_flags_take_both_spellings_of_hyphens_and_an_equals_sign():
    assert train_arguments(["--learning-rate", "1e-4", "--train_group_size=4"]) == {
        "learning_rate": "1e-4",
        "train_group_size": "4",
    }


def test_training_flag_takes_the_reference_s_other_name():
    assert train_arguments(["--lora-rank", "8", "--lora_target_groups", "attn, mlp"]) == {
        "lora_r": "8",
        "lora_target_groups": ["attn", "mlp"],
    }


def test_training_flag_alone_means_true():
    assert train_arguments(["--use_lora", "--packing=false"]) == {
        "use_lora": "true",
        "packing": "false",
    }


def test_unknown_training_flag_names_the_closest_one():
    with pytest.raises(ConfigError, match=r"unknown training flag 'learning_rat'.*'learning_rate'"):
        train_arguments(["--learning-rat", "1"])


def test_word_that_is_no_flag_is_refused():
    with pytest.raises(ConfigError, match="expected a flag that starts with --, got '3'"):
        train_arguments(["3"])


def test_flags_become_a_train_job():
    spec = merge_spec(
        JobKind.TRAIN,
        None,
        {"model": "m", "dataset": "d", "name": None},
        arguments={"learning_rate": "1e-4", "packing": "false"},
    )
    assert isinstance(spec, TrainJob)
    assert (spec.model, spec.arguments.learning_rate, spec.arguments.packing) == ("m", 1e-4, False)


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("kind: train\nmodel: a\ndataset: d\narguments: {learning_rate: 1.0, seed: 7}\n")
    spec = merge_spec(JobKind.TRAIN, file, {"model": "b"}, arguments={"learning_rate": "2.0"})
    assert isinstance(spec, TrainJob)
    assert (spec.model, spec.arguments.learning_rate, spec.arguments.seed) == ("b", 2.0, 7)


def test_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("kind: eval\ndataset: d\n")
    with pytest.raises(ConfigError, match="is a spec of kind 'eval', expected 'train'"):
        merge_spec(JobKind.TRAIN, file, {})


def test_every_fault_of_a_spec_has_a_line_with_its_place():
    with pytest.raises(ConfigError) as caught:
        make_spec(
            {"kind": "train", "model": "m", "arguments": {"learning_rate": "x", "nonsense": 1}},
            what="job",
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "job is not right:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == [
        "arguments.learning_rate",
        "arguments.nonsense",
        "dataset",
    ]


def test_run_file_resolves_its_paths_and_references(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "models: {base: models/base}\n"
        "datasets:\n  train: {kind: training, path: train.jsonl}\n"
        "jobs:\n"
        "  fit: {kind: train, model: base, dataset: train}\n"
        "  test: {kind: eval, dataset: scifact, rerank: {checkpoint: {from: fit}}}\n"
        "  teach: {kind: annotate, dataset: train, teacher: {checkpoint: {from: fit}}, limit: 5}\n"
        "  refit: {kind: train, model: base, dataset: {from: teach}}\n"
    )
    content = read_run_file(file)
    assert content.models[0].path == str(tmp_path / "models" / "base")
    assert content.datasets[0].path == str(tmp_path / "train.jsonl")
    test = content.jobs.jobs["test"]
    assert isinstance(test, EvalJob)
    assert test.rerank is not None
    assert test.rerank.checkpoint == From(source="fit")
    teach, refit = content.jobs.jobs["teach"], content.jobs.jobs["refit"]
    assert isinstance(teach, AnnotateJob)
    assert (teach.teacher.checkpoint, teach.limit) == (From(source="fit"), 5)
    assert isinstance(refit, TrainJob)
    assert refit.dataset == From(source="teach")


def test_run_file_with_an_unknown_key_names_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("job: {}\n")
    with pytest.raises(FormatError, match=r"run.yaml: unknown key 'job'; there are: datasets"):
        read_run_file(file)


def test_broken_yaml_names_the_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("jobs:\n  a: [1\n")
    with pytest.raises(FormatError, match=r"run.yaml:3: not YAML"):
        read_run_file(file)


def test_missing_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        read_run_file(tmp_path / "none.yaml")


def test_model_needs_exactly_one_source():
    with pytest.raises(ConfigError, match="expected exactly one of path and hub_id"):
        model_request("m", path=None, hub_id=None, revision=None)


def test_fault_of_the_whole_does_not_repeat_what_was_given():
    with pytest.raises(ConfigError) as caught:
        model_request("m", path=None, hub_id="owner/name", revision=None)
    assert str(caught.value) == "model is not right:\n  model: hub_id and revision go together"


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (
            "{kind: evl}",
            "jobs.a: 'kind' is one of 'train', 'export', 'eval', 'annotate', got 'evl'",
        ),
        ("{kind: eval}", "jobs.a.dataset: is required"),
        ("{kind: eval, dataset: d, splt: x}", "jobs.a.splt: there is no such field"),
        (
            "{kind: train, model: m, dataset: d, arguments: {lerning_rate: 1}}",
            "jobs.a.arguments.lerning_rate: unknown training flag 'lerning_rate'. Did you mean 'learning_rate'?",
        ),
    ],
)
def test_fault_in_a_file_is_told_in_its_own_words(tmp_path, job, told):
    file = tmp_path / "run.yaml"
    file.write_text(f"jobs:\n  a: {job}\n")
    with pytest.raises(ConfigError) as caught:
        read_run_file(file)
    assert str(caught.value).splitlines() == [f"{file} is not right:", f"  {told}"]


def test_every_training_flag_has_a_meaning():
    assert [flag for flag, _, meaning in train_flags() if not meaning] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_is_a_run_file(path):
    content = read_run_file(path)
    assert content.jobs.jobs


def test_there_are_examples():
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == {"main_road.yaml", "study.yaml"}


def test_text_is_taken_for_a_number_where_yaml_has_no_other_form():
    arguments = {"learning_rate": "1e-5", "max_steps": "8", "weight_decay": 0, "packing": "false"}
    spec = make_spec(
        {"kind": "train", "model": "m", "dataset": "d", "arguments": arguments}, what="it"
    )
    assert isinstance(spec, TrainJob)
    assert spec.arguments.learning_rate == 1e-5
    assert (spec.arguments.max_steps, spec.arguments.weight_decay) == (8, 0.0)
    assert spec.arguments.packing is False


def test_dataset_comes_from_a_path_or_from_the_hub(tmp_path):
    hub = {"hub_id": "owner/rows", "revision": "v1", "file": "train.jsonl"}
    request = dataset_request("rows", kind="training", **hub)
    assert request.model_dump(exclude_none=True) == {"name": "rows", "kind": "training", **hub}
    assert dataset_request("rows", kind="beir", path=tmp_path).path == str(tmp_path)
    with pytest.raises(ConfigError, match="by a path, --hub-id or --url, got none"):
        dataset_request("rows", kind="training")
