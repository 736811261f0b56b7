"""The Python client of the API: what the command uses, and what a script may use.

Knows HTTP, the wire types of core.contracts and problem documents. A request that never arrived, or that is safe to send
twice, is sent again; a submission carries an Idempotency-Key, so it is.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import JsonValue, TypeAdapter

from tevatron.core.contracts.jobs import JobEvent, JobGroup, JobSpec
from tevatron.core.contracts.resources import (
    CheckpointResource,
    DatasetRequest,
    DatasetResource,
    DatasetState,
    EvaluationComparison,
    EvaluationResource,
    EvaluationValue,
    JobResource,
    ModelRequest,
    ModelResource,
    Page,
    Resource,
    ScorerRequest,
    ScorerResource,
    SubmittedJobs,
)
from tevatron.core.contracts.webhooks import (
    DeliveryResource,
    NewWebhook,
    WebhookRequest,
    WebhookResource,
)
from tevatron.core.errors import ConfigError, TevatronError, UnavailableError
from tevatron.core.settings import Settings

TIMEOUT_S = 60.0
READING_TIMEOUT_S = 3600.0
"""For a registration, which ends when a whole model or dataset was read, or fetched from the hub."""
ATTEMPTS = 6
RETRY_STATUSES = frozenset({429, 502, 503, 504})
POLL_S = 1.0
PAGE_SIZE = 100

Item = TypeVar("Item", bound=Resource)
_event = TypeAdapter(JobEvent)


class ApiError(TevatronError):
    """The API refused a request; status, code and faults are those of its problem document."""

    def __init__(self, status: int, problem: Mapping[str, JsonValue]) -> None:
        self.status_code = status
        self.code = str(problem.get("code", f"http_{status}"))
        self.problem = dict(problem)
        super().__init__(_describe(status, problem))


def _describe(status: int, problem: Mapping[str, JsonValue]) -> str:
    lines = [f"{problem.get('title', 'error')} ({status}): {problem.get('detail', '')}"]
    if status == httpx.codes.UNAUTHORIZED:
        lines.append(
            "  TEVATRON_API_KEY holds the key; an operator makes one: tevatron keys create NAME"
        )
    faults = problem.get("errors")
    for fault in faults if isinstance(faults, list) else []:
        if not isinstance(fault, dict):
            continue
        place = fault.get("pointer") or fault.get("parameter") or fault.get("file")
        message = str(fault.get("message"))
        if place and message not in lines[0]:
            lines.append(f"  {place}: {message}")
    return "\n".join(lines)


def find_url(settings: Settings) -> str:
    """Return where the API answers: TEVATRON_URL, or what `tevatron up` wrote into the home."""
    if settings.url:
        return settings.url
    stack = read_stack_file(settings.home)
    if stack is None:
        raise ConfigError(
            f"no API found: TEVATRON_URL is not set and no `tevatron up` runs on {settings.home} "
            "(start one, or name its home with TEVATRON_HOME)"
        )
    return str(stack["url"])


def read_stack_file(home: Path) -> dict[str, JsonValue] | None:
    """Return what a running `tevatron up` says of itself, None where there is none."""
    try:
        content: dict[str, JsonValue] = json.loads((home / "run" / "stack.json").read_text())
    except FileNotFoundError:
        return None
    return content


class Client:
    """One connection to an API; close it, or use it in a `with`."""

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport
        )

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Connect to the API that the environment or a running stack names."""
        key = settings.api_key.get_secret_value() if settings.api_key else None
        return cls(find_url(settings), api_key=key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    # Jobs

    def submit(
        self, submission: JobSpec | JobGroup, *, idempotency_key: str | None = None
    ) -> list[JobResource]:
        """Store one job, or several in one transaction; returns them in the order of the request."""
        key = idempotency_key or str(uuid.uuid4())
        body = submission.model_dump(mode="json", by_alias=True, exclude_none=True)
        answer = self._send("POST", "/v1/jobs", body=body, headers={"Idempotency-Key": key})
        return SubmittedJobs.model_validate(answer).jobs

    def job(self, job_id: str) -> JobResource:
        """Return one job."""
        return JobResource.model_validate(self._send("GET", f"/v1/jobs/{job_id}"))

    def jobs(self, *, limit: int | None = None) -> list[JobResource]:
        """Return jobs, newest first."""
        return self._list("/v1/jobs", JobResource, limit=limit)

    def cancel(self, job_id: str) -> JobResource:
        """Ask for the end of a job."""
        return JobResource.model_validate(self._send("POST", f"/v1/jobs/{job_id}:cancel", body={}))

    def resume(self, job_id: str) -> JobResource:
        """Go on with a job that was cancelled or has failed."""
        return JobResource.model_validate(self._send("POST", f"/v1/jobs/{job_id}:resume", body={}))

    def save(self, job_id: str) -> JobResource:
        """Ask a training for a resumable state."""
        return JobResource.model_validate(self._send("POST", f"/v1/jobs/{job_id}:save", body={}))

    def stop(self, job_id: str) -> JobResource:
        """Ask a training to end after its step, and to publish."""
        return JobResource.model_validate(self._send("POST", f"/v1/jobs/{job_id}:stop", body={}))

    def events(self, job_id: str, *, after: int = 0) -> list[JobEvent]:
        """Return the events after a seq that are there now, oldest first."""
        found: list[JobEvent] = []
        while True:
            page = self._send(
                "GET", f"/v1/jobs/{job_id}/events", params={"after": after, "limit": PAGE_SIZE}
            )
            data = page["data"]
            assert isinstance(data, list)
            found += [_event.validate_python(entry) for entry in data]
            if not page.get("has_more") or not data:
                return found
            after = found[-1].seq

    def follow(self, job_id: str) -> Iterator[JobEvent]:
        """Yield events as they come, until the job is over; a stream that breaks off is taken up again."""
        headers = {"Accept": "text/event-stream"}
        path = f"/v1/jobs/{job_id}/events"
        is_over = False
        while True:
            # Raises where there is no such job, or where the API does not come back.
            self.job(job_id)
            try:
                with self._http.stream("GET", path, headers=headers) as answer:
                    for event in _streamed(answer):
                        headers["Last-Event-ID"] = str(event.seq)
                        yield event
                        # Not the end of the stream: a job that was resumed has events after it.
                        is_over = event.ends_job
                if is_over or answer.status_code == httpx.codes.NO_CONTENT:
                    return
            except httpx.TransportError:
                pass  # asked again below, from the last event on
            time.sleep(POLL_S)

    # What jobs use and make

    def register_model(self, request: ModelRequest) -> ModelResource:
        """Register a base model; returns when all of it is hashed."""
        body = request.model_dump(mode="json", exclude_none=True)
        answer = self._send("POST", "/v1/models", body=body, timeout_s=READING_TIMEOUT_S)
        return ModelResource.model_validate(answer)

    def register_dataset(self, request: DatasetRequest) -> DatasetResource:
        """Register a dataset by its path or hub id; returns when all of it is read."""
        body = request.model_dump(mode="json", exclude_none=True)
        answer = self._send("POST", "/v1/datasets", body=body, timeout_s=READING_TIMEOUT_S)
        return DatasetResource.model_validate(answer)

    def upload_dataset(self, request: DatasetRequest, content: Path) -> DatasetResource:
        """Register a dataset and send its content; returns when all of it is read. One that awaits it takes it now."""
        known = self.find_dataset(request.name)
        if known is None or known.state is not DatasetState.AWAITING_CONTENT:
            self.register_dataset(request)
        try:
            with content.open("rb") as file:
                answer = self._http.put(
                    f"/v1/datasets/{request.name}/content",
                    content=file,
                    headers={"Content-Type": "application/octet-stream"},
                    timeout=READING_TIMEOUT_S,
                )
        except httpx.TransportError as error:
            raise UnavailableError(
                f"{self._http.base_url} broke off the upload: {error}"
            ) from error
        return DatasetResource.model_validate(_content(answer))

    def find_model(self, ref: str) -> ModelResource | None:
        """Return the model that a job would take under this name or id, if there is one."""
        return self._find(f"/v1/models/{ref}", ModelResource)

    def find_dataset(self, ref: str) -> DatasetResource | None:
        """Return the dataset that a job would take under this name or id, if there is one."""
        return self._find(f"/v1/datasets/{ref}", DatasetResource)

    def models(self) -> list[ModelResource]:
        """Return the registered models."""
        return self._list("/v1/models", ModelResource)

    def datasets(self) -> list[DatasetResource]:
        """Return the registered datasets."""
        return self._list("/v1/datasets", DatasetResource)

    def checkpoints(self) -> list[CheckpointResource]:
        """Return the published checkpoints."""
        return self._list("/v1/checkpoints", CheckpointResource)

    def request_scorer(self, request: ScorerRequest) -> ScorerResource:
        """Ask for a scorer; it is not ready yet."""
        body = request.model_dump(mode="json", exclude_none=True)
        return ScorerResource.model_validate(self._send("POST", "/v1/scorers", body=body))

    def scorer(self, ref: str) -> ScorerResource:
        """Return a scorer, by id or name."""
        return ScorerResource.model_validate(self._send("GET", f"/v1/scorers/{ref}"))

    def scorers(self) -> list[ScorerResource]:
        """Return the scorers."""
        return self._list("/v1/scorers", ScorerResource)

    def release_scorer(self, ref: str) -> ScorerResource:
        """Let a scorer go."""
        return ScorerResource.model_validate(self._send("DELETE", f"/v1/scorers/{ref}"))

    def add_webhook(self, request: WebhookRequest) -> NewWebhook:
        """Have a URL told how jobs end; the answer has the secret, this once."""
        body = request.model_dump(mode="json", exclude_none=True)
        return NewWebhook.model_validate(self._send("POST", "/v1/webhooks", body=body))

    def webhooks(self) -> list[WebhookResource]:
        """Return the webhooks."""
        return self._list("/v1/webhooks", WebhookResource)

    def deliveries(self, ref: str) -> list[DeliveryResource]:
        """Return what was or is to be sent to a webhook."""
        return self._list(f"/v1/webhooks/{ref}/deliveries", DeliveryResource)

    def remove_webhook(self, ref: str) -> None:
        """End a webhook."""
        self._send("DELETE", f"/v1/webhooks/{ref}")

    def evaluations(self, *, job_id: str | None = None) -> list[EvaluationResource]:
        """Return the evaluations, newest first."""
        found = self._list("/v1/evaluations", EvaluationResource)
        return [entry for entry in found if job_id is None or entry.job_id == job_id]

    def evaluation(self, ref: str) -> EvaluationResource:
        """Return an evaluation, by id or name."""
        return EvaluationResource.model_validate(self._send("GET", f"/v1/evaluations/{ref}"))

    def comparison(self, ref: str, *, baseline: str) -> EvaluationComparison:
        """Return how an evaluation differs from another one with the same judgments."""
        path = f"/v1/evaluations/{ref}/comparison"
        return EvaluationComparison.model_validate(
            self._send("GET", path, params={"baseline": baseline})
        )

    def evaluation_values(self, evaluation_id: str) -> list[EvaluationValue]:
        """Return each query's values of an evaluation."""
        return self._list(f"/v1/evaluations/{evaluation_id}/values", EvaluationValue)

    # HTTP

    def _find(self, path: str, item: type[Item]) -> Item | None:
        try:
            return item.model_validate(self._send("GET", path))
        except ApiError as error:
            if error.status_code != httpx.codes.NOT_FOUND:
                raise
            return None

    def _list(self, path: str, item: type[Item], *, limit: int | None = None) -> list[Item]:
        found: list[Item] = []
        after: str | None = None
        while True:
            size = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - len(found))
            params: dict[str, str | int] = {"limit": size}
            if after is not None:
                params["after"] = after
            page = Page[item].model_validate(self._send("GET", path, params=params))  # type: ignore[valid-type]
            found += page.data
            after = page.next
            if not page.has_more or after is None or (limit is not None and len(found) >= limit):
                return found

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, JsonValue] | None = None,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, JsonValue]:
        is_repeatable = method == "GET" or bool(headers) or path.endswith((":cancel", ":stop"))
        for attempt in range(1, ATTEMPTS + 1):
            wait_s = min(0.25 * 2**attempt, 5.0)
            try:
                answer = self._http.request(
                    method, path, json=body, params=params, headers=headers, timeout=timeout_s
                )
            except httpx.TransportError as error:
                never_arrived = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if attempt == ATTEMPTS or not (is_repeatable or never_arrived):
                    raise UnavailableError(
                        f"{self._http.base_url} does not answer: {error}"
                    ) from error
            else:
                if answer.status_code not in RETRY_STATUSES or attempt == ATTEMPTS:
                    return _content(answer)
                wait_s = _retry_after(answer, default=wait_s)
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


def _streamed(answer: httpx.Response) -> Iterator[JobEvent]:
    """Yield the events of a stream: each is one `data:` line, and what else is sent says nothing more."""
    if not answer.is_success:
        answer.read()
        _content(answer)
    for line in answer.iter_lines():
        field, _, content = line.partition(":")
        if field == "data":
            yield _event.validate_json(content)


def _content(answer: httpx.Response) -> dict[str, JsonValue]:
    try:
        content = answer.json() if answer.content else {}
    except ValueError:
        content = {"detail": answer.text[:500]}
    if not isinstance(content, dict):
        content = {"detail": f"expected a JSON object, got {str(content)[:200]}"}
    if answer.is_success:
        return content
    raise ApiError(answer.status_code, content)


def _retry_after(answer: httpx.Response, *, default: float) -> float:
    try:
        return min(float(answer.headers.get("Retry-After", default)), 30.0)
    except ValueError:
        return default
