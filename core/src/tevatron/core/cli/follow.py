"""Following jobs to their end: progress bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tevatron.core.cli.client import POLL_S, Client
from tevatron.core.contracts.jobs import FINAL_STATES, EventType, JobEvent, JobState
from tevatron.core.contracts.resources import JobResource

MAX_BARS = 20
"""Jobs that get a bar each; more of them are told in lines, which a terminal can scroll."""


class View(Protocol):
    """What shows the jobs' progress."""

    def show(self, job: JobResource, events: Sequence[JobEvent]) -> None:
        """Take in the state of a job and what has happened since the last call."""
        ...


def follow_jobs(
    client: Client, jobs: Sequence[JobResource], *, quiet: bool = False
) -> list[JobResource]:
    """Show the jobs' progress on standard error until all are over; returns them as they ended."""
    if quiet:
        return _follow(client, jobs, Silent())
    if not sys.stderr.isatty() or len(jobs) > MAX_BARS:
        return _follow(client, jobs, Lines())
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        return _follow(client, jobs, Bars(progress))


def _follow(client: Client, jobs: Sequence[JobResource], view: View) -> list[JobResource]:
    current = {job.id: job for job in jobs}
    seen = dict.fromkeys(current, 0)
    try:
        while True:
            for job_id in [job_id for job_id, job in current.items() if seen[job_id] >= 0]:
                if _is_blocked(current[job_id], current):
                    continue
                job = client.job(job_id)
                events = client.events(job_id, after=seen[job_id])
                current[job_id] = job
                view.show(job, events)
                seen[job_id] = events[-1].seq if events else seen[job_id]
                if job.state in FINAL_STATES:
                    # Its events were read after its state: none can be missing.
                    seen[job_id] = -1
            if all(after < 0 for after in seen.values()):
                return list(current.values())
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        running = " ".join(job.id for job in current.values() if job.state not in FINAL_STATES)
        typer.echo(
            f"\nno longer followed, still going on: {running}  (tevatron cancel ID ends one)",
            err=True,
        )
        raise


def _is_blocked(job: JobResource, followed: Mapping[str, JobResource]) -> bool:
    """Say whether nothing can have happened to the job: it waits for one that is followed and is not over."""
    return job.state is JobState.WAITING and any(
        followed[source].state not in FINAL_STATES
        for source in job.depends_on
        if source in followed
    )


def all_succeeded(jobs: Sequence[JobResource]) -> bool:
    """Say whether the followed jobs came to a good end."""
    return all(job.state is JobState.SUCCEEDED for job in jobs)


def label(job: JobResource) -> str:
    """Return what a line about this job begins with."""
    return job.name or f"{job.kind} {job.id[-6:]}"


def describe(event: JobEvent) -> str:
    """Say in one line what an event says."""
    data = event.data
    match event.type:
        case EventType.STATE:
            why = f" ({data['reason']}: {data.get('message', '')})" if data.get("reason") else ""
            return f"{data.get('state')}{why}"
        case EventType.PHASE:
            return f"{data.get('phase')}"
        case EventType.PROGRESS:
            return f"{data.get('done')}/{data.get('total')} {data.get('unit', '')}"
        case EventType.METRICS:
            return " ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in data.items()
            )
        case EventType.LOG:
            return f"{data.get('level')}: {data.get('message')}"


class Silent:
    """Shows nothing."""

    def show(self, job: JobResource, events: Sequence[JobEvent]) -> None:
        """Do nothing."""


class Lines:
    """One line for each event; progress and steps at most every ten seconds a job.

    A step that was held back is shown once the job does something else, so that the last one is always seen.
    """

    EVERY_S = 10.0

    def __init__(self) -> None:
        self._shown_at: dict[tuple[str, EventType], float] = {}
        self._held: dict[str, list[JobEvent]] = {}

    def show(self, job: JobResource, events: Sequence[JobEvent]) -> None:
        """Write the events to standard error."""
        for shown in (one for event in events for one in self._due(job.id, event)):
            typer.echo(f"{shown.time:%H:%M:%S} {label(job)}: {describe(shown)}", err=True)

    def _due(self, job_id: str, event: JobEvent) -> list[JobEvent]:
        """Return what is to be shown now that this event came."""
        if not self._is_frequent(event):
            return [*self._held.pop(job_id, []), event]
        is_due = self._is_due((job_id, event.type))
        if event.type is EventType.METRICS:
            self._held[job_id] = [] if is_due else [event]
        return [event] if is_due else []

    def _is_frequent(self, event: JobEvent) -> bool:
        if event.type is EventType.PROGRESS:
            return event.data.get("done") != event.data.get("total")
        # A step's; an evaluation's are few, and looked for.
        return event.type is EventType.METRICS and "loss" in event.data

    def _is_due(self, key: tuple[str, EventType]) -> bool:
        now = time.monotonic()
        if now - self._shown_at.get(key, -self.EVERY_S) < self.EVERY_S:
            return False
        self._shown_at[key] = now
        return True


class Bars:
    """One bar for each job."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, job: JobResource, events: Sequence[JobEvent]) -> None:
        """Move the job's bar; warnings and errors go above the bars."""
        if job.id not in self._tasks:
            self._tasks[job.id] = self._progress.add_task(
                label(job), total=None, text=str(job.state), start=False
            )
        task = self._tasks[job.id]
        for event in events:
            if event.type is EventType.PROGRESS:
                done, total = event.data.get("done"), event.data.get("total")
                if isinstance(done, int | float) and isinstance(total, int | float):
                    self._progress.update(task, completed=done, total=total)
            elif event.type is EventType.LOG and event.data.get("level") in ("warning", "error"):
                self._progress.console.print(f"{label(job)}: {describe(event)}", markup=False)
        if job.started_at is not None and not self._progress.tasks[task].started:
            self._progress.start_task(task)
        self._progress.update(task, text=_text(job, events))
        if job.state in FINAL_STATES:
            self._progress.stop_task(task)


def _text(job: JobResource, events: Sequence[JobEvent]) -> str:
    text = str(job.phase) if job.phase and job.state is JobState.RUNNING else str(job.state)
    metrics = [
        event.data for event in events if event.type is EventType.METRICS and "loss" in event.data
    ]
    loss = metrics[-1]["loss"] if metrics else None
    return f"{text} loss {loss:.3f}" if isinstance(loss, float) else text
