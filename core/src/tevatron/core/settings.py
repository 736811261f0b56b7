"""Every setting, read from the environment here and nowhere else.

A field `lease_s` is read from `TEVATRON_LEASE_S`. Lists of paths are separated by the platform's path
separator, lists of URLs by commas.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from tevatron.core.errors import ConfigError

PREFIX = "TEVATRON_"


class Settings(BaseModel):
    """What an operator can set; durations in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Path(".tevatron")
    """Where the embedded stack keeps its own files."""
    data: Path = Path()
    """Root of all artifacts, mounted alike in every service; `$TEVATRON_HOME/data` when unset."""

    url: str | None = None
    """Where the API answers, for the command and the client."""
    api_key: SecretStr | None = None
    """Key that the command and the client send."""

    database_url: SecretStr | None = None
    """SQLAlchemy URL, postgresql+psycopg://..."""
    broker_url: SecretStr | None = None
    """Redis URL of the Celery broker."""

    api_host: str = "127.0.0.1"
    api_port: int = 8000
    max_body_bytes: int = 64 * 2**20
    """Largest JSON body of the API and the scorer."""
    max_upload_bytes: int = 16 * 2**30
    login_s: float = 12 * 3600.0
    """How long a browser stays logged in to the dashboard."""

    dataset_roots: list[Path] = Field(default_factory=list)
    """Folders under which `/v1/datasets` may register a path."""
    model_roots: list[Path] = Field(default_factory=list)
    """Folders under which `/v1/models` may register a path."""
    allow_hub: bool = False
    """Whether models and datasets may be registered by hub id and revision."""
    remote_roots: list[str] = Field(default_factory=list)
    """URL prefixes (s3://bucket/team) below which datasets are fetched and checkpoints are copied."""
    scorer_allow: list[str] = Field(default_factory=list)
    """URL prefixes that an administrator may register as outside scorers."""

    webhook_allow: list[str] = Field(default_factory=list)
    """URL prefixes of webhooks that may be plain http or inside the network; others are https to public addresses."""
    webhook_timeout_s: float = Field(default=10.0, gt=0)
    """How long one attempt to deliver may take, from the look-up of the name to the answer."""
    webhook_retry_s: float = Field(default=5.0, gt=0)
    """Pause after the first attempt that failed; each later one is four times as long, up to 8 hours."""

    lease_s: float = 60.0
    """How long a claim holds without a heartbeat."""
    heartbeat_s: float = 10.0
    kill_grace_s: float = 5.0
    """Between SIGTERM and SIGKILL of a cancelled attempt; the reaper waits it on top of the lease."""
    stop_grace_s: float = 60.0
    """How long a shutdown or a lost lease waits for the training state to be saved."""
    poll_s: float = 1.0
    """How often a worker looks for a cancel request; dispatcher and reaper, which are told of new work, look at every fifth."""
    republish_s: float = 15.0
    """Age after which a queued job's wake-up is published again."""
    max_attempts: int = 5
    """Attempts that may be lost to dead workers before a job fails with `worker_lost`."""

    devices: str | None = None
    """What this worker or host owns: `cpu`, or a list of GPU indices such as `0,1`."""
    megatron_python: Path | None = None
    """Interpreter of the environment with Megatron, which starts the ranks of `backend: megatron` jobs."""
    vllm_python: Path | None = None
    """Interpreter of the environment with vLLM, in which a scorer host starts servers of engine `vllm`."""
    launcher: str = "local"
    """What starts the ranks of train and export jobs: `local` (this worker's devices), `jobset` (Kubernetes), `slurm`."""
    job_launchers: list[str] = Field(default_factory=list)
    """Other launchers that a job may ask for."""
    unwatched_s: float = 900.0
    """How long ranks on a cluster go on while no worker watches them; then they save their state and end."""

    jobset_namespace: str = "tevatron"
    jobset_image: str | None = None
    """Image of the ranks of `backend: hf` jobs."""
    jobset_megatron_image: str | None = None
    """Image of the ranks of `backend: megatron` jobs."""
    jobset_claim: str = "tevatron-data"
    """Volume claim with TEVATRON_DATA, mounted under the same path as here."""
    jobset_queue: str | None = None
    """Kueue's local queue."""
    jobset_gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a node, one for each rank; 0 for ranks on CPUs."""
    jobset_pod: Path | None = None
    """YAML file that is merged into the pod's spec: node selectors, tolerations, variables of the network."""
    jobset_runtime: str | None = None
    """Kubeflow's TrainingRuntime in that namespace: a TrainJob is made in place of a JobSet."""

    slurm_partition: str | None = None
    slurm_gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a node, one for each rank; 0 for ranks on CPUs."""
    slurm_time_min: int | None = Field(default=None, ge=1)
    """Time limit of an attempt, before which the ranks save their state; the partition's when unset."""
    slurm_options: str = ""
    """More options of sbatch, as on its command line: `--account=lab --qos=long`."""
    slurm_python: Path | None = None
    """Interpreter of the ranks of `backend: hf` jobs on the nodes; this one's when unset."""

    advertise_url: str | None = None
    """Base URL under which others reach a scorer that this host starts; its port is filled in."""
    scorer_start_s: float = 600.0
    """How long a scorer may take from claim to ready."""
    scorer_slots: int = 2
    """Scorers that one host serves at a time on a CPU; with GPUs it serves one on each."""
    scorer_token: SecretStr | None = None
    """Bearer token that a scorer's server asks for; a host makes one for each scorer it starts."""
    scorer_idle_ttl_s: float = 300.0
    """How long a scorer that no job uses stays up, unless its row says otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _data_under_home(cls, values: dict[str, object]) -> dict[str, object]:
        home = Path(str(values.get("home") or ".tevatron")).expanduser().resolve()
        data = values.get("data")
        return {
            **values,
            "home": home,
            "data": Path(str(data)).expanduser().resolve() if data else home / "data",
        }

    @model_validator(mode="after")
    def _heartbeats_keep_the_lease(self) -> Self:
        if self.heartbeat_s >= self.lease_s:
            raise ValueError(
                f"{PREFIX}HEARTBEAT_S({self.heartbeat_s:g}) must be below {PREFIX}LEASE_S({self.lease_s:g})"
            )
        return self

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read `TEVATRON_*`; an unknown or malformed variable is a `ConfigError` that names it."""
        environment = os.environ if environment is None else environment
        values: dict[str, object] = {}
        for key, text in environment.items():
            name = key.removeprefix(PREFIX).lower()
            if not key.startswith(PREFIX) or name not in cls.model_fields or text == "":
                continue
            is_list = "list[" in str(cls.model_fields[name].annotation)
            # A URL has the platform's path separator in it.
            separator = "," if "://" in text else os.pathsep
            values[name] = text.split(separator) if is_list else text
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:
                # About several settings at once: its input is all of them, secrets too.
                raise ConfigError(first["msg"].removeprefix("Value error, ")) from error
            name = f"{PREFIX}{str(first['loc'][0]).upper()}"
            raise ConfigError(
                f"environment variable {name}: {first['msg']}, got {first.get('input')!r}"
            ) from error

    def require_database(self) -> str:
        """Return the database URL, or say which variable is missing."""
        if self.database_url is None:
            raise ConfigError(
                f"{PREFIX}DATABASE_URL is not set: expected postgresql+psycopg://user@host/database"
            )
        return self.database_url.get_secret_value()

    def require_broker(self) -> str:
        """Return the broker URL, or say which variable is missing."""
        if self.broker_url is None:
            raise ConfigError(f"{PREFIX}BROKER_URL is not set: expected redis://host:port/0")
        return self.broker_url.get_secret_value()
