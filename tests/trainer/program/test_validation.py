"""The numbers of held-out rows: against pytrec_eval and arithmetic by hand, however the rows are shared."""

import json
import math
import random
from pathlib import Path

import pytest
import pytrec_eval
from tests.support.tiny_model import tiny_tokenizer
from tests.trainer.program.training import write_dataset

from tevatron.core.contracts.train import LossName, TrainArguments
from tevatron.core.formats.training import Passage, TrainingRow
from tevatron.core.prompts import Pair, Renderer, get_template
from tevatron.trainer.program.data.rows import Demands, prepare_rows
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.validation import (
    Scoring,
    Validation,
    pack_prompts,
    row_loss,
    row_ndcg,
)


def row(positives: int, negatives: int, *, ids: list[str] | None = None) -> TrainingRow:
    names = ids or [f"d{place:02}" for place in range(positives + negatives)]
    passages = [
        Passage(f"text {place}", docid=name, score=float(place)) for place, name in enumerate(names)
    ]
    return TrainingRow("q", "what", passages[:positives], passages[positives:])


@pytest.mark.parametrize("seed", range(40))
def test_ndcg_is_trec_evals_also_with_ties(seed):
    draw = random.Random(seed)
    positives, negatives = draw.randrange(1, 15), draw.randrange(1, 30)
    ids = [f"d{number:03}" for number in draw.sample(range(200), positives + negatives)]
    # Few different scores, so that many are tied.
    scores = [draw.randrange(6) / 4 for _ in ids]
    qrels = {"q": dict.fromkeys(ids[:positives], 1)}
    run = {"q": dict(zip(ids, scores, strict=True))}
    found = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    assert row_ndcg(row(positives, negatives, ids=ids), scores) == pytest.approx(
        found["q"]["ndcg_cut_10"], abs=1e-12
    )


def test_a_model_that_scores_all_alike_gains_nothing_from_the_order_of_the_file():
    without_ids = TrainingRow("q", "what", [Passage("a")], [Passage("b"), Passage("c")])
    assert row_ndcg(without_ids, [0.0, 0.0, 0.0]) == pytest.approx(1 / math.log2(4))


def test_the_loss_is_of_the_first_positive_and_the_first_negatives():
    arguments = TrainArguments(train_group_size=3, student_temp=2.0)
    # Two positives; the second one and the last negative are in no group.
    found = row_loss(row(2, 3), [1.0, 50.0, -1.0, 3.0, 70.0], arguments)
    parts = [math.exp(score / 2) for score in (1.0, -1.0, 3.0)]
    assert found == pytest.approx(-math.log(parts[0] / sum(parts)), abs=1e-6)


def test_too_few_negatives_are_taken_again():
    arguments = TrainArguments(train_group_size=4)
    found = row_loss(row(1, 2), [1.0, 0.0, 2.0], arguments)
    parts = [math.exp(score) for score in (1.0, 0.0, 2.0, 0.0)]
    assert found == pytest.approx(-math.log(parts[0] / sum(parts)), abs=1e-6)


def test_a_teachers_scores_are_those_of_the_same_passages():
    arguments = TrainArguments(train_group_size=3, loss=LossName.MARGIN_MSE)
    # The teacher's scores are the places: margins -2 and -3 from the first positive.
    found = row_loss(row(2, 3), [1.0, 9.0, 2.0, -1.0, 9.0], arguments)
    assert found == pytest.approx(((-1 + 2) ** 2 + (2 + 3) ** 2) / 2, abs=1e-6)


def validation(folder: Path, num_rows: int) -> Validation:
    renderer = Renderer(get_template("tevatron"), tiny_tokenizer(), max_length=96)
    data = write_dataset(folder / "held.jsonl", num_rows)
    demands = Demands(group_size=4, needs_teacher=False)
    rows = prepare_rows(data, folder / "validation", renderer=renderer, demands=demands)
    return Validation(rows, renderer, TrainArguments(train_group_size=4, eval_steps=1))


def score(prompts: list[list[int]]) -> list[float]:
    return [math.sin(sum(prompt)) for prompt in prompts]


@pytest.mark.parametrize("num_rows", [1, 13, 70])
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_replicas_share_the_rows_and_are_asked_equally_often(tmp_path, num_rows, num_replicas):
    held_out = validation(tmp_path, num_rows)
    calls = {}

    def measured(replica: int, count: int) -> dict[str, float]:
        def counted(prompts):
            calls[count, replica] = calls.get((count, replica), 0) + 1
            return score(prompts)

        scoring = Scoring(
            score=counted, sums=lambda numbers: numbers, replica=replica, num_replicas=count
        )
        return held_out.measure(scoring)

    alone = measured(0, 1)
    shares = [measured(replica, num_replicas) for replica in range(num_replicas)]
    assert len({calls[num_replicas, replica] for replica in range(num_replicas)}) == 1
    for name in ("eval_loss", "eval_ndcg@10"):
        assert sum(share[name] for share in shares) == pytest.approx(alone[name], abs=1e-9)


def test_the_means_are_over_the_rows_in_the_file(tmp_path):
    held_out = validation(tmp_path, 13)
    scoring = Scoring(score=score, sums=lambda numbers: numbers, replica=0, num_replicas=1)
    values = []
    for line in (tmp_path / "held.jsonl").read_text().splitlines():
        content = json.loads(line)
        passages = [*content["positive_passages"], *content["negative_passages"]]
        ids = [
            held_out.renderer.render(
                Pair(query=content["query"], title=one.get("title", ""), text=one["text"])
            ).ids
            for one in passages
        ]
        scores = score(ids)
        values.append(-scores[0] + math.log(sum(math.exp(one) for one in scores[:4])))
    assert held_out.measure(scoring)["eval_loss"] == pytest.approx(sum(values) / 13, abs=1e-6)


def test_a_score_that_is_no_number_ends_the_run(tmp_path):
    scoring = Scoring(
        score=lambda prompts: [math.nan] * len(prompts),
        sums=lambda numbers: numbers,
        replica=0,
        num_replicas=1,
    )
    with pytest.raises(NotFiniteError, match="held-out query '0'"):
        validation(tmp_path, 2).measure(scoring)


def test_prompts_are_packed_within_the_budget_and_padded_ones_by_their_width():
    prompts = [[0] * length for length in (10, 2, 2, 2)]
    packed = TrainArguments(packing_max_tokens=16)
    assert pack_prompts(prompts, packed) == [[0, 1, 2, 3]]
    padded = TrainArguments(packing_max_tokens=20, packing=False)
    assert [len(indices) for indices in pack_prompts(prompts, padded)] == [2, 2]
    assert pack_prompts([], packed) == []
