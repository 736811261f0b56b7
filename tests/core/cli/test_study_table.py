"""The table that a study ends with, literally; the means are computed by hand."""

from __future__ import annotations

import re

import pytest
from tests.core.cli.test_output import job
from tests.core.cli.test_study import study_of

from tevatron.core.cli.study_table import (
    plan_json,
    print_plan,
    print_study,
    rows_of,
    shown_metric,
    study_json,
)
from tevatron.core.errors import ConfigError

FILE = """\
name: sizes
matrix:
  size: [s, m]
  stage: [bm25, e5]
  dataset: [tea, bees]
jobs:
  first-${{ matrix.stage }}-${{ matrix.dataset }}:
    kind: eval
    dataset: ${{ matrix.dataset }}
    first_stage:
      kind: ranklist
      dataset: ${{ matrix.dataset }}-${{ matrix.stage }}
    metrics: [ndcg@10, recall@10]
  fit-${{ matrix.size }}: {kind: train, model: base, dataset: rows, name: "${{ matrix.size }}-model"}
  test-${{ matrix.size }}-${{ matrix.stage }}-${{ matrix.dataset }}:
    kind: eval
    dataset: ${{ matrix.dataset }}
    first_stage:
      kind: ranklist
      dataset: ${{ matrix.dataset }}-${{ matrix.stage }}
    rerank:
      checkpoint:
        from: fit-${{ matrix.size }}
    metrics: [ndcg@10, recall@10]
"""


def done(name: str, value: float):
    metrics = {"ndcg@10": value, "recall@10": value / 2}
    return job(
        id=f"job_{name}", kind="eval", name=name, state="succeeded", result={"metrics": metrics}
    )


def ended(study):
    """The first stages and `s` are done, of `m` one is not."""
    jobs = {name: done(name, 0.5) for name in study.jobs}
    jobs |= {
        "test-s-e5-tea": done("test-s-e5-tea", 0.75),
        "fit-s": job(name="s-model", state="succeeded"),
        "fit-m": job(
            id="job_m", name="m-model", state="failed", reason="data_error", message="line 17"
        ),
        "test-m-bm25-bees": job(kind="eval", state="failed", reason="dependency_failed"),
        "test-m-e5-tea": job(kind="eval", state="running"),
        "test-m-e5-bees": job(kind="eval", state="cancelled"),
    }
    return jobs


def lines_of(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_a_row_for_each_cell_and_the_dataset_across(tmp_path, capsys):
    study = study_of(tmp_path, FILE)
    print_study(study, ended(study), metric="ndcg@10")
    assert lines_of(capsys.readouterr().out) == [
        ["sizes: 10 of 14 jobs succeeded, 1 cancelled, 2 failed, 1 running; ndcg@10"],
        ["reranker", "size", "stage", "tea", "bees", "mean"],
        ["first stage", "-", "bm25", "0.5000", "0.5000", "0.5000"],
        ["first stage", "-", "e5", "0.5000", "0.5000", "0.5000"],
        ["s-model", "s", "bm25", "0.5000", "0.5000", "0.5000"],
        ["s-model", "s", "e5", "0.7500", "0.5000", "0.6250"],
        ["m-model", "m", "bm25", "0.5000", "failed", "0.5000 (1 of 2)"],
        ["m-model", "m", "e5", "running", "cancelled", "-"],
        ["failed: m-model (job_m): data_error: line 17"],
    ]


def test_another_metric_and_one_that_there_is_not(tmp_path, capsys):
    study = study_of(tmp_path, FILE)
    assert shown_metric(study, None) == "ndcg@10"
    print_study(study, ended(study), metric=shown_metric(study, "recall@10"))
    assert ["s-model", "s", "e5", "0.3750", "0.2500", "0.3125"] in lines_of(capsys.readouterr().out)
    with pytest.raises(
        ConfigError, match=r"unknown metric 'recall@5'; .* Did you mean 'recall@10'"
    ):
        shown_metric(study, "recall@5")


def test_the_same_for_programs(tmp_path):
    study = study_of(tmp_path, FILE)
    found = study_json(study, ended(study), metric="ndcg@10")
    assert found["rows"][4] == {
        "reranker": "m-model",
        "variables": {"size": "m", "stage": "bm25"},
        "values": {"tea": 0.5, "bees": None},
        "jobs": {"tea": ["job_test-m-bm25-tea"], "bees": ["job_1"]},
        "mean": 0.5,
        "is_complete": False,
    }
    assert len(found["jobs"]) == 14


def test_the_plan_shows_the_cells_and_counts_the_jobs(tmp_path, capsys):
    study = study_of(tmp_path, FILE)
    print_plan(study)
    lines = lines_of(capsys.readouterr().out)
    assert lines[:3] == [
        ["sizes: 8 cells, 14 jobs (2 train, 12 eval)"],
        ["size", "stage", "dataset"],
        ["s", "bm25", "tea"],
    ]
    assert len(lines) == 10
    assert plan_json(study)["jobs"]["fit-m"]["name"] == "m-model"


def test_cqadupstacks_forums_are_one_column(tmp_path, capsys):
    text = FILE.replace("[tea, bees]", "[scifact, cqadupstack-tex, cqadupstack-gis]").replace(
        "    rerank:",
        "    benchmark: {name: beir15, dataset: '${{ matrix.dataset }}'}\n    rerank:",
    )
    study = study_of(tmp_path, text.replace("bm25, e5", "bm25"))
    jobs = {name: done(name, 0.5) for name in study.jobs}
    jobs["test-s-bm25-cqadupstack-tex"] = done("x", 0.25)
    print_study(study, jobs, metric="ndcg@10")
    lines = lines_of(capsys.readouterr().out)
    # (0.5 + (0.25 + 0.5) / 2) / 2, which is not the mean of the three.
    assert lines[3] == ["s-model", "s", "bm25", "0.5000", "-", "-", "0.3750", "0.4375 (2 of 4)"]


def test_two_evaluations_of_one_place_in_the_table_are_an_error(tmp_path):
    study = study_of(
        tmp_path, FILE + "  again: {kind: eval, dataset: tea}\n  more: {kind: eval, dataset: tea}\n"
    )
    with pytest.raises(ConfigError) as caught:
        rows_of(study)
    assert str(caught.value) == (
        "evaluations 'again' and 'more' would be the same row (first stage, -, -) and column (tea) of the table: "
        "make what differs a variable of the matrix"
    )
