"""The run's base model: where it lies, its tokenizer and renderer, and the weights ready to be trained.

Owns what decides the trainable part: head, LoRA, dtype of the weights. Training and the export of a saved state build
the same model through it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from tevatron.core.contracts.checkpoint import check_tokenizer, read_contract
from tevatron.core.contracts.jobs import FailReason
from tevatron.core.contracts.train import Head, TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.core.hub import model_folder
from tevatron.core.nn.attention import ATTENTION
from tevatron.core.nn.checks import check_length
from tevatron.core.nn.forward import ScoreHead
from tevatron.core.nn.loading import load_config, load_model, load_tokenizer, score_head
from tevatron.core.prompts import Renderer, get_template
from tevatron.trainer.program.failures import failing_as
from tevatron.trainer.program.lora import add_lora

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model folder with what its prompts need."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    head: ScoreHead


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """The model in memory; `adapted` is PEFT's wrapper around it where LoRA is on."""

    model: PreTrainedModel
    adapted: PeftModel | None

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name, tied ones once."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def open_base(name_or_path: str, arguments: TrainArguments) -> BaseModel:
    """Find the folder, check its config, load the tokenizer and resolve the prompt; no weights yet."""
    with failing_as(FailReason.MODEL_ERROR):
        folder = model_folder(name_or_path)
        config = load_config(folder)
        tokenizer = load_tokenizer(folder)
    contract = read_contract(folder)
    if contract is not None:
        # Begun from a checkpoint: with another tokenizer its weights would mean something else.
        check_tokenizer(contract, folder)
    check_length(config, arguments.rerank_max_len)
    renderer = Renderer(
        get_template(arguments.prompt_template),
        tokenizer,
        max_length=arguments.rerank_max_len,
        query_prefix=arguments.query_prefix,
        passage_prefix=arguments.passage_prefix,
        append_eos=arguments.append_eos_token,
    )
    ids = renderer.answer_ids
    if (ids is None) != (arguments.head is Head.SEQ_CLS):
        fitting = "pair" if arguments.head is Head.SEQ_CLS else "one with answers, as 'tevatron'"
        raise ConfigError(
            f"head '{arguments.head}' and template '{arguments.prompt_template}' do not go together; expected {fitting}"
        )
    head = (
        score_head(arguments.head)
        if ids is None
        else score_head(arguments.head, yes=ids.yes, no=ids.no)
    )
    return BaseModel(folder=folder, tokenizer=tokenizer, renderer=renderer, head=head)


def load_trainable(
    base: BaseModel, arguments: TrainArguments, *, device: torch.device
) -> TrainableModel:
    """Load the weights and make trainable what the arguments say; nothing to train is an error."""
    # Full fine-tuning keeps fp32 masters; frozen weights under LoRA need no more than the arithmetic's precision.
    dtype = arguments.dtype if arguments.use_lora and arguments.dtype != "float16" else "float32"
    set_seed(arguments.seed)
    attention = ATTENTION if arguments.packing else (arguments.attn_implementation or "sdpa")
    with failing_as(FailReason.MODEL_ERROR):
        model = load_model(
            base.folder,
            arguments.head,
            dtype=dtype,
            device=device,
            attention=attention,
            new_head=True,
        )
    set_seed(arguments.seed)
    adapted = add_lora(model, arguments) if arguments.use_lora else None
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    trainable = TrainableModel(model=model, adapted=adapted)
    count = sum(parameter.numel() for parameter in trainable.trainable().values())
    if count == 0:
        raise ConfigError("nothing to train: no parameter of the model is trainable")
    logger.info("head '%s', %d trainable parameters", arguments.head, count)
    return trainable
