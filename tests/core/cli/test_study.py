"""What a study's file becomes: jobs in an order that can be submitted, under keys that stay what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tevatron.core.cli.specs import read_run_file
from tevatron.core.cli.study import Study
from tevatron.core.contracts.jobs import EvalJob, TrainJob
from tevatron.core.errors import TevatronError

FILE = """\
name: sizes
matrix:
  size: [s, m]
  depth: [5, 10]
jobs:
  test-${{ matrix.size }}-${{ matrix.depth }}:
    kind: eval
    dataset: sample
    rerank:
      checkpoint:
        from: fit-${{ matrix.size }}
      depth: ${{ matrix.depth }}
  fit-${{ matrix.size }}:
    kind: train
    model: model-${{ matrix.size }}
    dataset: rows
    arguments: {max_steps: 3}
"""


def study_of(folder: Path, text: str = FILE) -> Study:
    file = folder / "study.yaml"
    file.write_text(text)
    study = read_run_file(file).study
    assert study is not None
    return study


def test_each_job_is_there_once_and_a_source_comes_first(tmp_path):
    study = study_of(tmp_path)
    assert list(study.jobs) == [
        "fit-s",
        "fit-m",
        "test-s-5",
        "test-s-10",
        "test-m-5",
        "test-m-10",
    ]
    fit, test = study.jobs["fit-m"], study.jobs["test-m-10"]
    assert isinstance(fit, TrainJob)
    assert isinstance(test, EvalJob)
    assert test.rerank is not None
    assert (fit.name, fit.model, test.rerank.depth) == ("fit-m", "model-m", 10)


def test_a_change_changes_the_keys_of_that_job_and_of_what_uses_it(tmp_path):
    before = study_of(tmp_path).keys()
    assert len(set(before.values())) == 6
    # Neither the order nor a default that is written out is a change.
    same = study_of(tmp_path, FILE.replace("{max_steps: 3}", "{max_steps: 3, lora_r: 16}"))
    assert same.jobs["fit-s"] == study_of(tmp_path).jobs["fit-s"]
    assert same.keys() == before
    more = study_of(tmp_path, FILE.replace("[5, 10]", "[20, 5, 10]")).keys()
    assert {name: more[name] for name in before} == before
    assert set(more) - set(before) == {"test-s-20", "test-m-20"}
    changed = study_of(
        tmp_path, FILE.replace("model: model-${{ matrix.size }}", "model: ${{ matrix.size }}")
    ).keys()
    assert not set(changed.values()) & set(before.values())
    one = FILE.replace(
        "size: [s, m]", "size: [s, m]\n  include: [{size: s, model: x}, {size: m, model: model-m}]"
    )
    one = study_of(tmp_path, one.replace("model-${{ matrix.size }}", "${{ matrix.model }}")).keys()
    assert {name for name in before if one[name] != before[name]} == {
        "fit-s",
        "test-s-5",
        "test-s-10",
    }
    renamed = study_of(tmp_path, FILE.replace("name: sizes", "name: again")).keys()
    assert not set(renamed.values()) & set(before.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: sizes\n", "", "study.yaml: field 'name': a study needs a name .*, got None"),
        ("name: sizes", "name: a b", "a study needs a name .*, got 'a b'"),
        ("matrix:", "matrices:", "unknown key 'matrices'; .* Did you mean 'matrix'"),
        ("[s, m]", "[]", r"study.yaml: matrix.size: expected a list of values, got \[\]"),
        ("from: fit-", "from: fitt-", "study.yaml: job 'test-s-5': unknown source job 'fitt-s'"),
        (
            "max_steps",
            "mx_steps",
            "jobs.fit-s.arguments.mx_steps: unknown training flag .* 'max_steps'",
        ),
        ("[5, 10]", "[5, x]", "jobs.test-s-x.rerank.depth: Input should be a valid integer"),
        ("fit-${{ matrix.size }}:", "fit ${{ matrix.size }}:", "jobs.fit s"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(tmp_path, old, new, message):
    assert old in FILE
    with pytest.raises(TevatronError) as caught:
        study_of(tmp_path, FILE.replace(old, new, 1))
    assert re.search(message, str(caught.value)), caught.value
