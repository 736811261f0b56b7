"""The model card of a checkpoint, README.md: how to score with it, and what it was made from.

Everything stands in `reranker.json` and the run's own files too; this is for people, and for the hub. Names come from users:
they stand in code spans and fenced blocks that they cannot end.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import ModelCardData
from pydantic import TypeAdapter, ValidationError

from tevatron.core.contracts.checkpoint import CONTRACT_NAME, CheckpointContract
from tevatron.core.contracts.resources import HubId
from tevatron.core.contracts.run import EVENTS_NAME, RunEvent, RunEventType, TrainRun

CARD_NAME = "README.md"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in which run a checkpoint comes from."""

    run: TrainRun
    step: int

    def validation(self) -> dict[str, float]:
        """Return what the held-out rows gave at this step; nothing where they were not scored then."""
        path = self.run.output_dir / EVENTS_NAME
        found: dict[str, float] = {}
        if not path.exists():
            return found
        with path.open("rb") as lines:
            for line in lines:
                # Most lines are of steps of the training.
                if b'"eval_' not in line:
                    continue
                event = RunEvent.model_validate_json(line)
                if event.type is RunEventType.METRICS and event.data["step"] == self.step:
                    found = {
                        name: value
                        for name, value in event.data.items()
                        if name != "step" and isinstance(value, int | float)
                    }
        return found


def write_card(
    folder: Path,
    contract: CheckpointContract,
    origin: Origin,
    *,
    form: Literal["merged", "adapter"],
) -> None:
    """Write the card into a checkpoint's folder."""
    metadata = ModelCardData(
        base_model=contract.base_model if _is_hub_id(contract.base_model) else None,
        library_name="peft" if form == "adapter" else "transformers",
        pipeline_tag="text-ranking",
        tags=["reranker", "tevatron"],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        "# Reranker",
        _how_to_score(contract, form=form),
        _made_from(contract, origin),
        _validation(origin),
        _arguments(origin.run),
    ]
    (folder / CARD_NAME).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _how_to_score(contract: CheckpointContract, *, form: Literal["merged", "adapter"]) -> str:
    template, answers = contract.template, contract.answer_ids
    if answers is None:
        score = "The score is the logit of the classification head."
    else:
        score = (
            f"The score is the logit of the answer {_code(json.dumps(template.yes))} (token {answers.yes}) less that of "
            f"{_code(json.dumps(template.no))} (token {answers.no}) at the prompt's last token."
        )
    weights = (
        "These are adapters in PEFT's format, for the base model below."
        if form == "adapter"
        else "The folder is plain Hugging Face: transformers and vLLM load it."
    )
    return f"""## How to score

{score} {weights} The prompt, from template {_code(template.name)} version {template.version}, of at most
{contract.max_length} tokens, of which a passage that is too long gives up its end:

{_block(template.text)}

Query prefix {_code(json.dumps(template.query_prefix))}, passage prefix {_code(json.dumps(template.passage_prefix))}\
{", an end-of-sequence token at the end" if template.append_eos else ""}.

With the package `tevatron-scorer` in this folder:

```
python -m tevatron.eval.serve.server --backend hf --model . --port 8100
curl localhost:8100/score -H 'Content-Type: application/json' \\
  -d '{{"candidates": [{{"query_id": "1", "docid": "a", "query": "...", "title": "", "text": "..."}}]}}'
```

On load the server scores the {len(contract.probes)} probes of `{CONTRACT_NAME}` and refuses a checkpoint that gives other scores than it gave
in training."""


def _made_from(contract: CheckpointContract, origin: Origin) -> str:
    run = origin.run
    lines = {
        "Base model": _with_sha256(contract.base_model, contract.base_model_sha256),
        "Training data": _with_sha256(
            run.dataset_name or Path(run.dataset_path).name, contract.training_data_sha256
        ),
        "Step": str(origin.step),
        "Backend": _code(run.backend),
        "Ranks": None if run.num_processes is None else str(run.num_processes),
        "Head": _code(contract.head),
        "Weights": _code(contract.dtype),
        "Code": _code(f"tevatron-trainer {contract.code_version}"),
    }
    listed = "\n".join(f"- {name}: {value}" for name, value in lines.items() if value is not None)
    return f"## Made from\n\n{listed}"


def _validation(origin: Origin) -> str:
    values = origin.validation()
    if not values:
        said = "No held-out rows were scored at this step."
    else:
        said = "\n".join(f"- {_code(name)}: {value:.4f}" for name, value in values.items())
    return f"## Held-out rows at step {origin.step}\n\n{said}"


def _arguments(run: TrainRun) -> str:
    """Write the arguments that are not the defaults, the backend's layout among them."""
    told = run.arguments.model_dump(mode="json", exclude_defaults=True)
    return f"""## Training arguments

Other than the defaults; all stand in `{CONTRACT_NAME}`.

{_block(json.dumps(told, indent=2))}"""


def _with_sha256(name: str, sha256: str | None) -> str:
    return _code(name) if sha256 is None else f"{_code(name)}, sha256 `{sha256}`"


def _is_hub_id(name: str) -> bool:
    try:
        TypeAdapter(HubId).validate_python(name)
    except ValidationError:
        return False
    return True


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _code(text: str) -> str:
    """Write a code span: more backticks around it than are in it, on one line."""
    line = " ".join(text.split())
    marks = "`" * (_longest_run(line) + 1)
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def _block(text: str) -> str:
    """Write a fenced block, with a fence longer than any within."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}\n{text}\n{fence}"
