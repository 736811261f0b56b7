"""The model card: valid for the hub, true, and harmless whatever the names are."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tests.trainer.program.training import (
    evaluations,
    make_run,
    run_export,
    run_training,
)

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.trainer.program.card import Origin, write_card

EVIL = "`<script>alert(1)</script>` ---\n---\nlicense: mit\n# ``x``"


@pytest.fixture(scope="module")
def run(llama, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    changes = {"use_lora": True, "lora_r": 4, "max_steps": 4, "save_steps": 2, "eval_steps": 2}
    run = make_run(llama, dataset, folder, validation=dataset, **changes)
    run = run.model_copy(update={"base_model": "acme/tiny", "dataset_name": "my-train"})
    return run, run_training(run)


def test_a_trained_checkpoint_has_a_card_that_the_hub_reads(run):
    config, events = run
    card = ModelCard.load(config.output_dir / "export" / "README.md")
    assert card.data.to_dict() == {
        "base_model": "acme/tiny",
        "library_name": "transformers",
        "pipeline_tag": "text-ranking",
        "tags": ["reranker", "tevatron"],
    }
    contract = read_contract(config.output_dir / "export")
    text = card.text
    assert f"- Base model: `acme/tiny`, sha256 `{contract.base_model_sha256}`" in text
    assert f"- Training data: `my-train`, sha256 `{contract.training_data_sha256}`" in text
    assert f"`tevatron-trainer {contract.code_version}`" in text
    assert f"(token {contract.answer_ids.yes})" in text
    assert contract.template.text in text
    last = evaluations(events)[-1]
    assert last["step"] == 4
    assert "## Held-out rows at step 4" in text
    assert f"- `eval_loss`: {last['eval_loss']:.4f}\n" in text
    assert f"- `eval_ndcg@10`: {last['eval_ndcg@10']:.4f}\n" in text
    blocks = [token.content for token in MarkdownIt().parse(text) if token.type == "fence"]
    told = json.loads(blocks[-1])
    assert (told["lora_r"], told["eval_steps"]) == (4, 2)


def test_an_export_job_has_the_card_of_its_step_and_form(run, tmp_path):
    config, events = run
    assert run_export(tmp_path, config.output_dir, step=2, form="adapter") == 0
    card = ModelCard.load(tmp_path / "export" / "README.md")
    assert card.data.library_name == "peft"
    first = evaluations(events)[0]
    assert f"## Held-out rows at step 2\n\n- `eval_loss`: {first['eval_loss']:.4f}\n" in card.text
    assert "adapters in PEFT's format" in card.text


def test_a_step_that_was_not_evaluated_is_said(run, tmp_path):
    config, _ = run
    contract = read_contract(config.output_dir / "export")
    write_card(tmp_path, contract, Origin(config, 3), form="merged")
    text = (tmp_path / "README.md").read_text()
    assert "No held-out rows were scored at this step." in text


def test_the_names_that_people_give_are_harmless(run, tmp_path):
    config, _ = run
    contract = read_contract(config.output_dir / "export")
    contract = contract.model_copy(
        update={
            "base_model": EVIL,
            "code_version": EVIL,
            "template": contract.template.model_copy(
                update={"query_prefix": EVIL, "text": f"```\n{EVIL}\n~~~"}
            ),
        }
    )
    arguments = config.arguments.model_copy(update={"query_prefix": EVIL})
    config = config.model_copy(update={"dataset_name": EVIL, "arguments": arguments})
    write_card(tmp_path, contract, Origin(config, 4), form="merged")
    card = ModelCard.load(tmp_path / "README.md")
    assert sorted(card.data.to_dict()) == ["library_name", "pipeline_tag", "tags"]
    tokens = MarkdownIt().parse(card.text)
    html = MarkdownIt().render(card.text)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5
    # No rule, no heading and no other block begins within a name.
    assert {token.type for token in tokens}.isdisjoint({"hr", "html_block"})
    assert re.findall(r"<h1>.*</h1>", html) == ["<h1>Reranker</h1>"]
    assert html.count("<h2>") == 4
