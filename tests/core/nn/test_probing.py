"""The prompt scorer: order, budget, and the proof of a contract."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.checkpoint import (
    AnswerTokenIds,
    CheckpointContract,
    Probe,
    TemplateContract,
)
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ContractError
from tevatron.core.nn.forward import YesNoHead, score_packed
from tevatron.core.nn.loading import load_model
from tevatron.core.nn.probing import PromptScorer, prove

PROMPTS = [[1, 2, 3], [4] * 30, [5, 6], [7, 8, 9, 10], [11] * 12]
HEAD = YesNoHead(yes=30, no=40)


@pytest.fixture
def model(tmp_path):
    return load_model(tiny_folder(tmp_path), Head.YES_NO, dtype="float32", device="cpu")


@pytest.mark.parametrize("max_tokens", [1, 16, 8192])
def test_scores_come_in_the_order_given_whatever_the_budget(model, max_tokens):
    with torch.no_grad():
        expected = [score_packed(model, [prompt], HEAD).item() for prompt in PROMPTS]
    got = PromptScorer(model, HEAD, max_tokens=max_tokens).score(PROMPTS)
    assert got == pytest.approx(expected, abs=1e-5)


def test_threads_score_at_a_time(model):
    scorer = PromptScorer(model, HEAD, max_tokens=16)
    expected = scorer.score(PROMPTS)
    model.train(True)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(scorer.score, [PROMPTS] * 16))
    assert all(scores == pytest.approx(expected, abs=1e-5) for scores in found)
    assert model.training


def test_no_prompts_no_scores(model):
    assert PromptScorer(model, HEAD).score([]) == []


def test_the_mode_of_the_model_is_kept(model):
    model.train()
    PromptScorer(model, HEAD).score(PROMPTS)
    assert model.training


def contract(scores):
    return CheckpointContract(
        template=TemplateContract(
            name="tevatron",
            version=1,
            query_prefix="query:",
            passage_prefix="passage:",
            text="{query}",
            yes=" yes",
            no=" no",
        ),
        answer_ids=AnswerTokenIds(yes=30, no=40),
        head=Head.YES_NO,
        max_length=64,
        dtype="float32",
        base_model="tiny",
        base_model_sha256=None,
        tokenizer_sha256="0" * 64,
        training_data_sha256=None,
        arguments=None,
        code_version="test",
        probes=[
            Probe(query="q", title="", text="t", token_ids=prompt, score=score)
            for prompt, score in zip(PROMPTS, scores, strict=True)
        ],
    )


def test_a_contract_is_proved_or_refused(model):
    scorer = PromptScorer(model, HEAD)
    scores = scorer.score(PROMPTS)
    assert prove(scorer, contract(scores), dtype="float32") <= 1e-6
    with pytest.raises(ContractError, match="probe 3"):
        prove(scorer, contract([*scores[:3], scores[3] + 0.01, scores[4]]), dtype="float32")
    swapped = PromptScorer(model, YesNoHead(yes=40, no=30))
    with pytest.raises(ContractError, match="probe 0"):
        prove(swapped, contract(scores), dtype="float32")
