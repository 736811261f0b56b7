"""Follows contracts/run.py as the training program does, without a model: for tests of what watches it.

STAND_IN in its environment is a JSON object:
  steps, step_s         how many steps, and how long each takes
  save_steps            a state every so many steps
  export                folder that is copied as the export
  at_step               {"<step>": "kill" | "hang" | "raise" | "fail:<reason>"}; `kill` once only, so that a retry gets by
  ranks                 ranks to which at_step applies (all when absent)
  deaf                  ignore SIGTERM
  no_word               raise without a `failed` event
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tevatron.core.process import die_with_parent

CONFIG = Path(sys.argv[1])
RUN = CONFIG.parent
BEHAVIOUR = json.loads(os.environ.get("STAND_IN", "{}"))
RANK = int(os.environ.get("RANK", "0"))
asked = False


def event(kind: str, **data: object) -> None:
    if RANK == 0:
        with (RUN / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "type": kind, "data": data}) + "\n")


def on_term(number: int, frame: object) -> None:
    global asked
    if BEHAVIOUR.get("deaf"):
        return
    if (RUN / "cancel").exists():
        os._exit(1)
    asked = True


def save(step: int) -> None:
    if RANK == 0:
        event("phase", phase="saving")
        (RUN / "states").mkdir(exist_ok=True)
        half = RUN / "states" / f"step-{step}.tmp"
        half.mkdir(exist_ok=True)
        (half / "state.json").write_text(json.dumps({"step": step}))
        final = RUN / "states" / f"step-{step}"
        if final.exists():
            shutil.rmtree(final)
        half.rename(final)
        event("state_saved", step=step)
        event("phase", phase="training")


def newest_step() -> int:
    steps = [
        int(path.name.split("-")[1]) for path in RUN.glob("states/step-*") if "." not in path.name
    ]
    return max(steps, default=0)


def act(what: str) -> None:
    if what == "kill":
        once = RUN / f"killed-{RANK}"
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill_always":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        time.sleep(600)
    elif what == "raise":
        raise RuntimeError("the stand-in was told to raise")
    elif what.startswith("fail:"):
        reason = what.split(":")[1]
        event("failed", reason=reason, phase="training", message=f"told to fail with {reason}")
        sys.exit(1)


def train() -> None:
    steps, save_steps = BEHAVIOUR.get("steps", 4), BEHAVIOUR.get("save_steps", 2)
    event("phase", phase="loading")
    first = newest_step()
    event("log", level="info", message=f"starting at step {first}")
    event("phase", phase="training")
    for step in range(first + 1, steps + 1):
        time.sleep(BEHAVIOUR.get("step_s", 0.01))
        if RANK in BEHAVIOUR.get("ranks", [RANK]):
            act(BEHAVIOUR.get("at_step", {}).get(str(step), ""))
        event("metrics", step=step, loss=1.0 / step)
        event("progress", done=step, total=steps, unit="steps")
        if asked:
            save(step)
            event("stopped", step=step)
            sys.exit(0)
        if step % save_steps == 0:
            save(step)
    if RANK == 0:
        event("phase", phase="exporting")
        half = RUN / "export.tmp"
        if half.exists():
            shutil.rmtree(half)
        shutil.copytree(BEHAVIOUR["export"], half)
        act(BEHAVIOUR.get("at_export", ""))
        half.rename(RUN / "export")
        act(BEHAVIOUR.get("after_export", ""))
        event("exported", step=steps)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, on_term)
    sys.stdout.write(f"stand-in rank {RANK} of {os.environ.get('WORLD_SIZE')} runs\n")
    try:
        train()
    except RuntimeError as error:
        if not BEHAVIOUR.get("no_word"):
            event("failed", reason="program_failed", phase="training", message=str(error))
        raise


if __name__ == "__main__":
    main()
