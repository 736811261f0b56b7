"""Submitting a study where the API refuses; tests/api/test_study_command.py has the rest."""

from __future__ import annotations

import pytest
from tests.core.cli.test_output import job
from tests.core.cli.test_study import study_of

from tevatron.core.cli.client import ApiError
from tevatron.core.cli.study_run import submit_study
from tevatron.core.errors import ConfigError


class Refusing:
    """A client whose API answers with the problems that it is given, one after the other, and then takes the job."""

    def __init__(self, *problems: ApiError) -> None:
        self.problems = list(problems)
        self.taken: dict[str, str] = {}

    def submit(self, spec, *, idempotency_key: str):
        if self.problems:
            raise self.problems.pop(0)
        self.taken[idempotency_key] = spec.name
        return [job(id=f"job_{len(self.taken)}", name=spec.name, state="queued")]


def problem(status: int, **fields) -> ApiError:
    return ApiError(status, {"title": "no", "detail": "now", **fields})


def test_where_the_api_takes_no_more_the_study_waits_and_says_so_once(tmp_path, capsys):
    study = study_of(tmp_path)
    client = Refusing(problem(429), problem(429))
    found = submit_study(client, study, resume=False)
    assert list(found) == list(study.jobs)
    assert client.taken == {key: name for name, key in study.keys().items()}
    assert capsys.readouterr().err == "fit-s waits until the API takes it: no (429): now\n"


def test_a_key_that_stands_for_something_else_says_what_to_do(tmp_path):
    client = Refusing(problem(422, code="idempotency_key_reused"))
    with pytest.raises(ConfigError) as caught:
        submit_study(client, study_of(tmp_path), resume=False)
    assert str(caught.value).splitlines() == [
        "study 'sizes', job 'fit-s': no (422): now",
        "  an older version of this command has submitted it; under another name the study begins anew",
    ]
