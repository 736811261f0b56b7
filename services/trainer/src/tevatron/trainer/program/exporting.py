"""Publishing a trained model: a folder in Hugging Face's layout with its contract, proved by loading it back.

The scores in the contract are those of the training model itself, taken before anything is merged, cast or written.
The folder gets its name only when it was loaded again by core's loader and gave these scores.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from tevatron.core.contracts.checkpoint import (
    FP32_TOLERANCE,
    CheckpointContract,
    Dtype,
    Probe,
    TemplateContract,
    answer_ids_of,
    check_token_ids,
    check_tokenizer,
    measured_tolerance,
    renderer,
    write_contract,
)
from tevatron.core.contracts.probes import renderable_probes
from tevatron.core.contracts.run import EXPORT_NAME, TrainRun
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head, TrainArguments
from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.formats.files import sha256_tree
from tevatron.core.nn.attention import ATTENTION
from tevatron.core.nn.loading import DTYPES, load_model, load_tokenizer
from tevatron.core.nn.probing import PromptScorer, prove
from tevatron.core.prompts import Pair
from tevatron.trainer.program.card import CARD_NAME, Origin, write_card
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.models import BaseModel, TrainableModel
from tevatron.trainer.program.states import publish_folder

logger = logging.getLogger(__name__)

SHARD_SIZE = "5GB"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is published, and in which form."""

    output_dir: Path
    """The folder in which `name` is made."""
    name: str = EXPORT_NAME
    run: TrainRun
    """The training that it is of."""
    base: BaseModel
    dataset_sha256: str | None
    dtype: Dtype
    device: torch.device
    adapter_only: bool = False

    @property
    def arguments(self) -> TrainArguments:
        """How it was trained."""
        return self.run.arguments

    def publish(self, trained: TrainableModel, *, step: int) -> Path:
        """Write, load back, prove and name the folder; the model in memory, of that step, is used up."""
        written = self.begin()
        scores = self._score_probes(trained.model)
        self._write_weights(trained, written)
        return self.finish(written, scores, step=step)

    def begin(self) -> Path:
        """Return an empty folder for the weights."""
        written = self.output_dir / f"{self.name}.tmp"
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        return written

    def probe_ids(self) -> list[list[int]]:
        """Return the probes as the training model is to score them."""
        return [self.base.renderer.render(pair).ids for pair in self._probe_pairs()]

    def write_adapter(self, adapted: PeftModel, folder: Path) -> None:
        """Write the adapters alone, with the base model's name."""
        adapted.save_pretrained(str(folder), safe_serialization=True)
        self._name_base(folder)

    def finish(self, written: Path, scores: list[float], *, step: int) -> Path:
        """Add tokenizer, contract and card to the weights, prove that they give these scores, and name the folder."""
        if not all(torch.isfinite(torch.tensor(scores))):
            raise NotFiniteError(
                f"the trained model gives probes scores that are not finite: {scores}"
            )
        probes = [
            Probe(query=pair.query, title=pair.title, text=pair.text, token_ids=ids, score=score)
            for pair, ids, score in zip(self._probe_pairs(), self.probe_ids(), scores, strict=True)
        ]
        for name in _TOKENIZER_FILES:
            if (self.base.folder / name).is_file():
                shutil.copyfile(self.base.folder / name, written / name)
        contract = self._contract(written, probes)
        write_contract(written, contract)
        self._prove(written, contract)
        write_card(
            written,
            contract,
            Origin(self.run, step),
            form="adapter" if self.adapter_only else "merged",
        )
        final = self.output_dir / self.name
        shutil.rmtree(final, ignore_errors=True)
        publish_folder(written, final)
        return final

    def _probe_pairs(self) -> tuple[Pair, ...]:
        return tuple(renderable_probes(self.base.renderer))

    def _score_probes(self, model: PreTrainedModel) -> list[float]:
        half = None if self.arguments.dtype == "float32" else DTYPES[self.arguments.dtype]
        nn.Module.to(model, self.device)
        model.set_attn_implementation(ATTENTION)
        return PromptScorer(model, self.base.head, autocast=half).score(self.probe_ids())

    def _write_weights(self, trained: TrainableModel, folder: Path) -> None:
        if self.adapter_only:
            if trained.adapted is None or self.arguments.head is Head.SEQ_CLS:
                raise ConfigError("form 'adapter' needs a LoRA run with head 'yes_no'")
            self.write_adapter(trained.adapted, folder)
        else:
            model = merged(trained)
            nn.Module.to(model, DTYPES[self.dtype])
            model.config.use_cache = True
            if self.arguments.head is Head.SEQ_CLS:
                # transformers' own head looks for the last token that is not padding.
                model.config.pad_token_id = self._pad_token_id()
            model.save_pretrained(str(folder), safe_serialization=True, max_shard_size=SHARD_SIZE)

    def _name_base(self, folder: Path) -> None:
        # PEFT writes the path of this machine; what people need is the base's name.
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = self.run.base_model
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (folder / CARD_NAME).unlink(missing_ok=True)

    def _pad_token_id(self) -> int | None:
        tokenizer = self.base.tokenizer
        pad: int | None = tokenizer.pad_token_id
        return tokenizer.eos_token_id if pad is None else pad

    def _contract(self, folder: Path, probes: list[Probe]) -> CheckpointContract:
        return CheckpointContract(
            template=TemplateContract.of(self.base.renderer),
            answer_ids=answer_ids_of(self.base.renderer),
            head=self.arguments.head,
            max_length=self.base.renderer.max_length,
            dtype=self.dtype,
            base_model=self.run.base_model,
            base_model_sha256=sha256_tree(self.base.folder),
            tokenizer_sha256=tokenizer_sha256(folder),
            training_data_sha256=self.dataset_sha256,
            arguments=self.arguments,
            code_version=code_version(),
            probes=probes,
            tolerance=self._tolerance(folder, probes),
        )

    def _tolerance(self, folder: Path, probes: list[Probe]) -> dict[Dtype, float]:
        """Measure how far the folder's scores lie from the training model's, by arithmetic."""
        exact = self.dtype == "float32" and self.arguments.dtype == "float32"
        tolerance: dict[Dtype, float] = {"float32": FP32_TOLERANCE}
        if exact:
            return tolerance
        expected = [probe.score for probe in probes]
        ids = [probe.token_ids for probe in probes]
        kinds: tuple[Dtype, ...] = (
            ("float32",) if self.dtype == "float32" else ("float32", self.dtype)
        )
        for dtype in kinds:
            # Rounded weights, or a training in half precision: fp32 cannot give the same scores to the third digit.
            measured = measured_tolerance(expected, self._reloaded(folder, dtype).score(ids))
            tolerance[dtype] = max(measured, tolerance.get(dtype, 0.0))
        return tolerance

    def _prove(self, folder: Path, contract: CheckpointContract) -> None:
        check_tokenizer(contract, folder)
        tokenizer = load_tokenizer(folder)
        check_token_ids(contract, renderer(contract, tokenizer))
        try:
            largest = prove(self._reloaded(folder, self.dtype), contract, dtype=self.dtype)
        except ConfigError as error:
            raise ContractError(f"the exported folder cannot be loaded back: {error}") from error
        logger.info("export loaded back in %s: probes differ by at most %.2g", self.dtype, largest)

    def _reloaded(self, folder: Path, dtype: Dtype) -> PromptScorer:
        source = self.base.folder if self.adapter_only else folder
        model = load_model(source, self.arguments.head, dtype=dtype, device=self.device)
        if self.adapter_only:
            model = _with_adapter(model, folder)
        return PromptScorer(model, self.base.head)


def merged(trained: TrainableModel) -> PreTrainedModel:
    """Return the model with its adapters merged into fp32 weights, or as it is without adapters."""
    if trained.adapted is None:
        return trained.model
    # bf16 weights would swallow an adapter's small changes one by one.
    nn.Module.to(trained.adapted, torch.float32)
    model = trained.adapted.merge_and_unload()
    assert isinstance(model, PreTrainedModel)
    return model


def code_version() -> str:
    """Return the version of the distribution that trained."""
    try:
        return version("tevatron-trainer")
    except PackageNotFoundError:
        return "source tree"


def _with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    adapted = PeftModel.from_pretrained(model, folder)
    inner = adapted.get_base_model()
    assert isinstance(inner, PreTrainedModel)
    inner.train(False)
    return inner
