"""A study: one job file over a matrix. What its jobs are, under which keys they are submitted, and in which order.

Pure; knows nothing of the API.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from tevatron.core.cli.matrix import Cell, Matrix
from tevatron.core.contracts.jobs import AnyJob, From
from tevatron.core.contracts.sources import check_group, job_sources, with_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The jobs of all cells, each once."""

    name: str
    matrix: Matrix
    jobs: Mapping[str, AnyJob]
    """By name, a source before what uses it."""
    cells_of: Mapping[str, list[Cell]]
    """The cells that share each job."""

    def keys(self) -> dict[str, str]:
        """Return each job's Idempotency-Key.

        It stands for the study, the job, its spec, and the keys of those whose output it uses: a job that is changed, or
        whose source is, is another one, and all others stay what they are.
        """
        keys: dict[str, str] = {}
        for name, spec in self.jobs.items():
            named = with_sources(
                spec, {source: From(source=keys[source]) for source in job_sources(spec)}
            )
            # Without defaults, so that a field that a later version adds does not change it.
            content = named.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            identity = [self.name, name, spec.kind.value, content]
            keys[name] = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return keys


def make_study(
    name: str, matrix: Matrix, *, jobs: Mapping[str, AnyJob], cells_of: Mapping[str, list[Cell]]
) -> Study:
    """Return the study; refuses jobs that cannot use each other's output as they say.

    Args:
        name: Of the study. What it has submitted is found again by it.
        matrix: The cells.
        jobs: By name; each is given it, unless it has one of its own.
        cells_of: The cells that each belongs to.
    """
    check_group(jobs)
    order = TopologicalSorter({job: job_sources(spec) for job, spec in jobs.items()})
    return Study(
        name=name,
        matrix=matrix,
        jobs={
            job: jobs[job].model_copy(update={"name": jobs[job].name or job})
            for job in order.static_order()
        },
        cells_of=cells_of,
    )
