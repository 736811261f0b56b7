"""From a model folder to something that may be served: contract, tokenizer, renderer, engine, and the proof.

A folder with a contract is served as the contract says or not at all; a plain one needs a template.
"""

from __future__ import annotations

import math
from dataclasses import replace

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
from tevatron.core.nn.loading import load_tokenizer
from tevatron.core.prompts import Renderer, get_template
from tevatron.scorer.engines import Engine, EngineOptions, get_engine
from tevatron.scorer.served import DEFAULT_MAX_LENGTH, Served, ServeOptions


def load(options: ServeOptions) -> Served:
    """Load and prove; any mismatch is an error with names and numbers, and nothing is served."""
    make_engine = get_engine(options.backend)
    options = replace(options, model=model_folder(str(options.model), revision=options.revision))
    contract = read_contract(options.model)
    if contract is None:
        built, head, dtype = _plain(options)
    else:
        _refuse_other_options(contract, options)
        built, head, dtype = _by_contract(contract, options)
    engine = make_engine(
        EngineOptions(
            model=options.model,
            head=head,
            answer_ids=built.answer_ids,
            dtype=dtype,
            device=options.device,
            max_batch_tokens=options.max_batch_tokens,
        )
    )
    difference = None
    if contract is not None:
        difference = _prove(engine, contract)
    else:
        _try_out(engine, built)
    info = _describe(options, built, engine, head, difference)
    if contract is not None:
        info = info.model_copy(
            update={"contract_sha256": sha256_file(options.model / CONTRACT_NAME)}
        )
    return Served(
        engine=engine,
        renderer=built,
        info=info,
        max_batch_tokens=options.max_batch_tokens,
    )


def _plain(options: ServeOptions) -> tuple[Renderer, Head, Dtype | None]:
    if options.prompt_template is None:
        raise ConfigError(
            f"{options.model} has no contract (reranker.json): say how it is prompted with --prompt_template"
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
        load_tokenizer(options.tokenizer or options.model),
        max_length=options.max_length or DEFAULT_MAX_LENGTH,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
        append_eos=bool(options.append_eos),
    )
    return built, head, options.dtype


def _by_contract(
    contract: CheckpointContract, options: ServeOptions
) -> tuple[Renderer, Head, Dtype | None]:
    folder = options.tokenizer or options.model
    check_tokenizer(contract, folder)
    built = renderer(contract, load_tokenizer(folder))
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
    """Score a few probes, so that a model that gives no numbers is found before it is ready."""
    pairs = renderable_probes(built)
    # The last one is as long as prompts get.
    scores = engine.score([built.render(pair).ids for pair in [*pairs[:2], pairs[-1]]])
    if not all(math.isfinite(score) for score in scores):
        raise ConfigError(f"the model gives scores that are no finite numbers: {scores}")


def _describe(
    options: ServeOptions, built: Renderer, engine: Engine, head: Head, difference: float | None
) -> ScorerInfo:
    about, ids = engine.info(), built.answer_ids
    return ScorerInfo(
        backend=options.backend,
        model_name_or_path=options.model.name,
        prompt_template=built.template.name,
        head=head,
        yes_id=ids.yes if ids else None,
        no_id=ids.no if ids else None,
        max_length=built.max_length,
        dtype=about.dtype,
        max_probe_difference=difference,
        versions={**about.versions, "device": about.device},
    )
