"""A small valid contract, a folder that passes for a checkpoint, and a worker whose attempts leave no process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.megatron_worker import Worker

from tevatron.core.contracts.checkpoint import (
    AnswerTokenIds,
    CheckpointContract,
    Probe,
    TemplateContract,
    write_contract,
)
from tevatron.core.contracts.train import Head, TrainArguments
from tevatron.core.process import end_processes, processes_with_marker
from tevatron.core.prompts import get_template
from tevatron.core.settings import Settings
from tevatron.core.store.session import Sessions


@pytest.fixture
def contract() -> CheckpointContract:
    template = get_template("tevatron")
    return CheckpointContract(
        template=TemplateContract(
            name="tevatron",
            version=template.version,
            query_prefix="query:",
            passage_prefix="passage:",
            text=template.readable(),
            yes=template.yes,
            no=template.no,
        ),
        answer_ids=AnswerTokenIds(yes=1, no=2),
        head=Head.YES_NO,
        max_length=128,
        dtype="float32",
        base_model="tiny",
        base_model_sha256=None,
        tokenizer_sha256="0" * 64,
        training_data_sha256=None,
        arguments=TrainArguments(),
        code_version="3.0.0",
        probes=[Probe(query="q", title="", text="t", token_ids=[1, 2, 3], score=0.5)],
    )


@pytest.fixture
def checkpoint_folder(tmp_path: Path, contract: CheckpointContract) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_contract(folder, contract)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def worker(settings: Settings, sessions: Sessions) -> Iterator[Worker]:
    found = Worker(settings, sessions)
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)
