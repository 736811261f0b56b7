"""What the launcher tells a rank through its environment; read here and nowhere else in the program."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tevatron.core.contracts.run import ATTEMPT_VARIABLE


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Which rank this process is; one process without torchrun is rank 0 of 1."""

    rank: int
    world_size: int
    attempt: str | None
    """`<job id>:<attempt>` under a worker."""
    local_rank: int = 0
    """Which of this machine's ranks, and so which GPU."""

    @classmethod
    def read(cls) -> RankEnvironment:
        """Read torchrun's and the worker's variables."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            attempt=os.environ.get(ATTEMPT_VARIABLE),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )


def hide_torchrun() -> None:
    """Take away the variable by which libraries see that torchrun started this process."""
    os.environ.pop("LOCAL_RANK", None)


def set_tracker_defaults() -> None:
    """Set what W&B and MLflow go by where the user has not said otherwise."""
    for name, text in _TRACKER_DEFAULTS.items():
        os.environ.setdefault(name, text)


_TRACKER_DEFAULTS = {
    # Nothing but what the run reports leaves the machine, and no URL is printed, in which a password may stand.
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Seconds between writes of W&B's own file: what a kill may take away. Its default is 15.
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",
}
