"""Held-out rows scored while the training goes on: their loss, and nDCG@10 of each row's own passages.

Every passage of a row is scored once, by the training's own forward pass; both numbers come from these scores. The
loss is that of the row's first positive and first negatives, so that each evaluation compares the same passages. It
knows no model and no ranks: a backend lends them as `Scoring`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.formats.training import Passage, TrainingRow
from tevatron.core.packing import pack
from tevatron.core.prompts import Pair, Renderer
from tevatron.trainer.program.data.rows import RowFile
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.losses import Temperatures, get_loss

VALIDATION_NAME = "validation"
"""Folder of the held-out rows within the run folder."""
CUTOFF = 10
_ROWS_AT_A_TIME = 32
"""Rows of a replica whose prompts are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What a backend lends: its forward pass, and how its replicas share the rows."""

    score: Callable[[list[list[int]]], list[float]]
    """One score a prompt, there may be none. All ranks call it alike, those of one replica with the same prompts, and
    each gets the scores."""
    sums: Callable[[list[float]], list[float]]
    """Sums over the replicas."""
    replica: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Validation:
    """The held-out rows of a run."""

    rows: RowFile
    renderer: Renderer
    arguments: TrainArguments

    def measure(self, scoring: Scoring) -> dict[str, float]:
        """Return eval_loss and eval_ndcg@10, means over the rows; every rank must call it."""
        loss = ndcg = 0.0
        for rows in self._chunks(scoring):
            prompts = [prompt for row in rows for prompt in self._prompts(row)]
            scores = iter(scoring.score(prompts))
            for row in rows:
                own = [next(scores) for _ in (*row.positives, *row.negatives)]
                if not all(map(math.isfinite, own)):
                    raise NotFiniteError(f"held-out query '{row.query_id}': its scores are {own}")
                loss += row_loss(row, own, self.arguments)
                ndcg += row_ndcg(row, own)
        loss, ndcg = scoring.sums([loss, ndcg])
        return {"eval_loss": loss / len(self.rows), f"eval_ndcg@{CUTOFF}": ndcg / len(self.rows)}

    def _chunks(self, scoring: Scoring) -> Iterator[list[TrainingRow]]:
        """Yield this replica's rows, in as many chunks as every other replica has."""
        step = _ROWS_AT_A_TIME * scoring.num_replicas
        for start in range(0, len(self.rows), step):
            end = min(start + step, len(self.rows))
            own = range(start + scoring.replica, end, scoring.num_replicas)
            yield [self.rows[index] for index in own]

    def _prompts(self, row: TrainingRow) -> list[list[int]]:
        pairs = [
            Pair(query=row.query, title=one.title, text=one.text)
            for one in (*row.positives, *row.negatives)
        ]
        return [rendered.ids for rendered in self.renderer.render_all(pairs)]


def pack_prompts(prompts: Sequence[Sequence[int]], arguments: TrainArguments) -> list[list[int]]:
    """Divide prompts into forward passes within the token budget; return their indices by pass."""
    lengths = [len(prompt) for prompt in prompts]
    if not arguments.packing:
        # Every row of a pass is padded to its longest.
        lengths = [max(lengths, default=0)] * len(lengths)
    return pack(lengths, max_tokens=arguments.packing_max_tokens)


def row_loss(row: TrainingRow, scores: Sequence[float], arguments: TrainArguments) -> float:
    """Return the run's loss of the first positive and the first negatives; these again where they are too few.

    scores: one a passage, positives first.
    """
    first = len(row.positives)
    places = [0] + [
        first + number % len(row.negatives) for number in range(arguments.train_group_size - 1)
    ]
    passages: list[Passage] = [*row.positives, *row.negatives]
    scores_1G = torch.tensor([[scores[place] for place in places]])
    loss = get_loss(arguments.loss)
    teacher_1G = None
    if loss.needs_teacher:
        teacher_1G = torch.tensor([[passages[place].score for place in places]])
    temperatures = Temperatures(student=arguments.student_temp, teacher=arguments.teacher_temp)
    return float(loss.function(scores_1G, teacher_1G, temperatures))


def row_ndcg(row: TrainingRow, scores: Sequence[float]) -> float:
    """Return nDCG@10 of the row's passages with its positives relevant, ties broken as trec_eval does: docid descending.

    Passages without docids, or of one docid, stand in the order that is worst for the model: a positive comes last.
    """
    passages = [*row.positives, *row.negatives]
    order = sorted(
        range(len(passages)),
        key=lambda place: (scores[place], passages[place].docid or "", place),
        reverse=True,
    )
    num_positives = len(row.positives)
    gains = (_discount(rank) for rank, place in enumerate(order[:CUTOFF]) if place < num_positives)
    return math.fsum(gains) / math.fsum(map(_discount, range(min(CUTOFF, num_positives))))


def _discount(rank: int) -> float:
    return 1 / math.log2(rank + 2)
