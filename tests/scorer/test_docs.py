"""What docs/scoring.md says of code is run."""

import asyncio
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from tests.support.scorers import running_app
from tests.support.tiny_model import tiny_folder
from transformers import AutoModelForCausalLM

from tevatron.core.prompts import TEMPLATES, Pair
from tevatron.scorer.engines import ENGINES, EngineEntry, EngineFlags
from tevatron.scorer.loading import load
from tevatron.scorer.served import ServeOptions

PAGE = (Path(__file__).parents[2] / "docs" / "scoring.md").read_text()


@pytest.fixture
def plain_engine(monkeypatch):
    """Register the page's example as a person would."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = types.ModuleType("plain_engine_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "docs/scoring.md", "exec"), module.__dict__)
    entry = EngineEntry(make=module.PlainEngine, honours=frozenset())
    monkeypatch.setitem(ENGINES, "plain", entry)


def test_the_example_engine_serves_and_scores_as_hf_does(plain_engine, tmp_path):
    folder = tiny_folder(tmp_path, "qwen3")
    options = {"model": folder, "prompt_template": "tevatron", "max_length": 128}
    texts = ["bees see ultraviolet", "x" * 500, ""]
    answers = []

    async def ask():
        async with running_app(lambda: load(ServeOptions(backend="plain", **options))) as client:
            body = {"query": "bees", "documents": texts, "raw_scores": True}
            answers.append((await client.post("/v2/rerank", json=body)).json())

    asyncio.run(ask())
    hf = load(ServeOptions(backend="hf", flags=EngineFlags(device="cpu"), **options))
    ids = [hf.renderer.render(Pair(query="bees", text=text)).ids for text in texts]
    got = {one["index"]: one["relevance_score"] for one in answers[0]["results"]}
    assert [got[at] for at in range(3)] == pytest.approx(hf.engine.score(ids), abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids[0]])).logits[0, -1]
    assert got[0] == pytest.approx(float(logits[259] - logits[261]), abs=1e-4)


def test_the_page_lists_every_template():
    for name in TEMPLATES:
        assert f"| `{name}` |" in PAGE
