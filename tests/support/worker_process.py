"""A worker whose eval jobs do what their name says: `python -m tests.support.worker_process`.

Each run of a job adds a line `<job id> <attempt> <name>` to `ran` in TEVATRON_DATA.
- `quick...` succeeds at once; `long...` works until it is told to stop; `fail...` fails.
"""

from __future__ import annotations

import sys

from tevatron.core.contracts.jobs import EvalJob, JobKind, Phase
from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.core.worker.main import serve
from tevatron.core.worker.runner import Finished, JobContext

RAN = "ran"


def evaluate(context: JobContext, spec: EvalJob) -> Finished:
    claim = context.claim
    context.settings.data.mkdir(parents=True, exist_ok=True)
    with (context.settings.data / RAN).open("a") as ran:
        ran.write(f"{claim.job_id} {claim.attempt} {claim.name}\n")
    context.phase(Phase.RETRIEVING)
    name = str(claim.name)
    if name.startswith("fail"):
        raise ConfigError("told to fail")
    if name.startswith("long") and context.wait(600.0) is not None:
        context.check()
    return Finished(result={"attempt": claim.attempt})


if __name__ == "__main__":
    sys.exit(serve("evaluator", {JobKind.EVAL: evaluate}, Settings.from_environment()))
