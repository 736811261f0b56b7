"""From a model folder to something that may be served: contract, tokenizer, renderer, engine, and the proof.

A folder with a contract is served as the contract says or not at all; a plain one needs a template.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from tevatron.core.contracts.checkpoint import (
    CONTRACT_NAME,
    CheckpointContract,
    Dtype,
    check_head,
    check_scores,
    check_token_ids,
    check_tokenizer,
    read_contract,
    renderer,
    tolerance_for,
)
from tevatron.core.contracts.probes import renderable_probes
from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.formats.files import sha256_file
from tevatron.core.hub import model_folder
from tevatron.core.nn.loading import ADAPTER_FILE, CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from tevatron.core.prompts import Renderer, get_template
from tevatron.scorer.engines import Engine, EngineOptions, get_engine
from tevatron.scorer.served import DEFAULT_MAX_LENGTH, Served, ServeOptions


def load(options: ServeOptions) -> Served:
    """Load and prove; any mismatch is an error with names and numbers, and nothing is served."""
    entry = get_engine(options.backend)
    folders = _folders(options, loads_adapters=entry.loads_adapters)
    contract = read_contract(folders.contract)
    if contract is None:
        built, head, dtype = _plain(folders, options)
    else:
        _refuse_other_options(contract, options)
        built, head, dtype = _by_contract(contract, folders, options)
    engine = entry.make(
        EngineOptions(
            model=folders.model,
            adapter=folders.adapter,
            head=head,
            answer_ids=built.answer_ids,
            max_length=built.max_length,
            dtype=dtype,
            flags=options.flags,
        )
    )
    about = engine.info()
    difference = tolerance = None
    if contract is not None:
        difference = _prove(engine, contract)
        tolerance = tolerance_for(contract, dtype=about.dtype)
    else:
        _try_out(engine, built)
    ids = built.answer_ids
    info = ScorerInfo(
        backend=options.backend,
        model_name_or_path=folders.contract.name,
        prompt_template=built.template.name,
        head=head,
        yes_id=ids.yes if ids else None,
        no_id=ids.no if ids else None,
        max_length=built.max_length,
        dtype=about.dtype,
        contract_sha256=(
            None if contract is None else sha256_file(folders.contract / CONTRACT_NAME)
        ),
        max_probe_difference=difference,
        probe_tolerance=tolerance,
        versions={**about.versions, "device": about.device},
    )
    return Served(engine=engine, renderer=built, info=info)


class _Folders(NamedTuple):
    """Where the parts of a model lie."""

    model: Path
    adapter: Path | None
    tokenizer: Path

    @property
    def contract(self) -> Path:
        """The folder whose contract counts: an adapter's scores are not its base model's."""
        return self.adapter or self.model


def _folders(options: ServeOptions, *, loads_adapters: bool) -> _Folders:
    model = model_folder(str(options.model), revision=options.revision)
    adapter = options.adapter
    if adapter is not None and not (adapter / ADAPTER_FILE).is_file():
        raise ConfigError(f"--lora_name_or_path {adapter}: expected a folder with {ADAPTER_FILE}")
    if adapter is None and (model / ADAPTER_FILE).is_file() and not (model / CONFIG_FILE).is_file():
        adapter, model = model, _base_of(model)
    if adapter is not None and not loads_adapters:
        raise ConfigError(
            f"{adapter} holds a PEFT adapter, and engine '{options.backend}' loads none: publish merged weights with an "
            "export job"
        )
    own = adapter is not None and (adapter / TOKENIZER_FILE).is_file()
    tokenizer = options.tokenizer or (adapter if adapter is not None and own else model)
    return _Folders(model, adapter, tokenizer)


def _base_of(adapter: Path) -> Path:
    try:
        config = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
        name = config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{adapter / ADAPTER_FILE} names no base_model_name_or_path: {error}"
        ) from error
    try:
        return model_folder(str(name))
    except ConfigError as error:
        raise ConfigError(
            f"{adapter} is an adapter of '{name}', which is not there: name its base with --model and this folder with "
            f"--lora_name_or_path ({error})"
        ) from error


def _plain(folders: _Folders, options: ServeOptions) -> tuple[Renderer, Head, Dtype | None]:
    if options.prompt_template is None:
        raise ConfigError(
            f"{folders.contract} has no contract (reranker.json): say how it is prompted with --prompt_template"
        )
    template = get_template(options.prompt_template)
    head = options.head or (Head.SEQ_CLS if template.yes is None else Head.YES_NO)
    if (template.yes is None) != (head is Head.SEQ_CLS):
        raise ConfigError(
            f"template '{template.name}' {'has no' if template.yes is None else 'asks for'} answers, which does not "
            f"go with head '{head}'"
        )
    built = Renderer(
        template,
        load_tokenizer(folders.tokenizer),
        max_length=options.max_length or DEFAULT_MAX_LENGTH,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
        append_eos=bool(options.append_eos),
    )
    return built, head, options.dtype


def _by_contract(
    contract: CheckpointContract, folders: _Folders, options: ServeOptions
) -> tuple[Renderer, Head, Dtype | None]:
    check_tokenizer(contract, folders.tokenizer)
    built = renderer(contract, load_tokenizer(folders.tokenizer))
    check_token_ids(contract, built)
    dtype = options.dtype or contract.dtype
    tolerance_for(contract, dtype=dtype)
    return built, contract.head, dtype


def _refuse_other_options(contract: CheckpointContract, options: ServeOptions) -> None:
    """Refuse an option that says something else than the contract: one of the two is wrong."""
    if options.head is not None:
        check_head(contract, options.head)
    template = contract.template
    for name, given, own in (
        ("prompt_template", options.prompt_template, template.name),
        ("query_prefix", options.query_prefix, template.query_prefix),
        ("passage_prefix", options.passage_prefix, template.passage_prefix),
        ("append_eos_token", options.append_eos, template.append_eos),
        ("rerank_max_len", options.max_length, contract.max_length),
    ):
        if given is not None and given != own:
            raise ContractError(
                f"--{name} differs: contract has {own!r}, got {given!r}; leave it out"
            )


def _prove(engine: Engine, contract: CheckpointContract) -> float:
    scores = engine.score([probe.token_ids for probe in contract.probes])
    return check_scores(contract, scores, dtype=engine.info().dtype)


def _try_out(engine: Engine, built: Renderer) -> None:
    """Score the probes, so that a model that gives no numbers, or always the same, is found before it is ready."""
    # The last probes are as long as prompts get.
    prompts = [built.render(pair).ids for pair in renderable_probes(built)]
    scores = engine.score(prompts)
    if not all(math.isfinite(score) for score in scores):
        raise ConfigError(f"the model gives scores that are no finite numbers: {scores}")
    if len(set(scores)) == 1:
        raise ConfigError(
            f"the model gives each of {len(scores)} different prompts the score {scores[0]}: it cannot rank"
        )
