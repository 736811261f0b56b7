"""Reads Dockerfiles: which stages they have, and what stands in each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    name: str
    base: str
    """An image, or another stage."""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for found, text in self.instructions if found == keyword]


def read_stages(path: Path) -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            stages[name] = Stage(name, base)
            current = stages[name]
        elif keyword and stages:
            current.instructions.append((keyword, rest.strip()))
    return stages


def inherited(stages: dict[str, Stage], name: str, keyword: str) -> list[str]:
    """What a stage and the stages below it say, its own last."""
    stage = stages[name]
    below = inherited(stages, stage.base, keyword) if stage.base in stages else []
    return below + stage.all(keyword)
