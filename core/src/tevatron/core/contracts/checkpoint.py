"""The checkpoint contract, `reranker.json`: how a checkpoint must be prompted, and the proof that it is.

Owns the schema, reading and writing, and the checks that every engine makes on load. A mismatch is a `ContractError`
with names and numbers. Knows no model: scores come in as numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head, TrainArguments
from tevatron.core.errors import ContractError, PromptError
from tevatron.core.prompts import (
    DEFAULT_PASSAGE_PREFIX,
    DEFAULT_QUERY_PREFIX,
    Pair,
    Renderer,
    Template,
    Tokenizer,
    get_template,
)

CONTRACT_NAME = "reranker.json"
FP32_TOLERANCE = 1e-3

Dtype = Literal["float32", "bfloat16", "float16"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _fp32_tolerance() -> dict[Dtype, float]:
    return {"float32": FP32_TOLERANCE}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TemplateContract(_Part):
    """The prompt template, with everything that changes its string."""

    name: str
    version: int
    query_prefix: str
    passage_prefix: str
    append_eos: bool = False
    text: str
    """The template in readable form, `{slots}` included."""
    yes: str | None
    """The answer that means relevant; None where the head gives the score."""
    no: str | None

    @classmethod
    def of(cls, renderer: Renderer) -> Self:
        """Describe a renderer's template."""
        template = renderer.template
        return cls(
            name=template.name,
            version=template.version,
            query_prefix=renderer.query_prefix,
            passage_prefix=renderer.passage_prefix,
            append_eos=renderer.append_eos,
            text=template.readable(),
            yes=template.yes,
            no=template.no,
        )


class AnswerTokenIds(_Part):
    """The ids of the two answers, as they follow the prompt."""

    yes: int
    no: int


class Probe(_Part):
    """A pair with the token ids and the score that training gave it."""

    query: str
    title: str
    text: str
    token_ids: list[int] = Field(min_length=1)
    score: Finite

    def pair(self) -> Pair:
        """Return the pair alone."""
        return Pair(query=self.query, title=self.title, text=self.text)


class CheckpointContract(_Part):
    """Content of `reranker.json`."""

    schema_version: Literal[1] = 1
    template: TemplateContract
    answer_ids: AnswerTokenIds | None
    """None for a head that gives the score itself."""
    head: Head
    max_length: int = Field(ge=1)
    dtype: Dtype
    """Arithmetic in which the checkpoint is meant to be scored."""
    base_model: str
    base_model_sha256: Sha256 | None
    tokenizer_sha256: Sha256
    training_data_sha256: Sha256 | None
    arguments: TrainArguments | None
    code_version: str
    probes: list[Probe] = Field(min_length=1)
    tolerance: dict[Dtype, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=_fp32_tolerance
    )
    """Largest difference of a probe's score that passes, by the arithmetic of the engine."""

    @model_validator(mode="after")
    def _answers_match_head(self) -> Self:
        if (self.answer_ids is None) != (self.head is Head.SEQ_CLS):
            raise ValueError(
                f"head '{self.head}' and answer_ids {self.answer_ids} do not go together"
            )
        return self


def read_contract(folder: Path | str) -> CheckpointContract | None:
    """Return the folder's contract, None where it has none; a broken one is a `ContractError`."""
    path = Path(folder) / CONTRACT_NAME
    if not path.is_file():
        return None
    try:
        return CheckpointContract.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ContractError(
            f"{path}: field '{place}': {first['msg']}, got {str(first['input'])[:80]!r}"
        ) from error


def write_contract(folder: Path | str, contract: CheckpointContract) -> None:
    """Write `reranker.json` into a checkpoint's folder."""
    (Path(folder) / CONTRACT_NAME).write_text(
        contract.model_dump_json(indent=2) + "\n", encoding="utf-8"
    )


def answer_ids_of(renderer: Renderer) -> AnswerTokenIds | None:
    """Return a renderer's answer ids in the contract's form."""
    ids = renderer.answer_ids
    return None if ids is None else AnswerTokenIds(yes=ids.yes, no=ids.no)


def renderer(contract: CheckpointContract, tokenizer: Tokenizer) -> Renderer:
    """Build the renderer that the contract describes; a template or answers that differ are a `ContractError`."""
    stored = contract.template
    template = _same_template(stored)
    try:
        built = Renderer(
            template,
            tokenizer,
            max_length=contract.max_length,
            query_prefix=stored.query_prefix,
            passage_prefix=stored.passage_prefix,
            append_eos=stored.append_eos,
        )
    except PromptError as error:
        raise ContractError(
            f"the contract's template cannot be used with this tokenizer: {error}"
        ) from error
    answer_ids = answer_ids_of(built)
    if answer_ids != contract.answer_ids:
        raise ContractError(
            f"answer ids differ: contract {contract.answer_ids}, this tokenizer {answer_ids}"
        )
    return built


def _same_template(stored: TemplateContract) -> Template:
    try:
        template = get_template(stored.name)
    except PromptError as error:
        raise ContractError(f"the contract's {error}") from error
    if template.version != stored.version:
        raise ContractError(
            f"template '{stored.name}' differs: contract has version {stored.version}, this build {template.version}"
        )
    if (template.yes, template.no) != (stored.yes, stored.no):
        raise ContractError(
            f"answers of template '{stored.name}' differ: contract has {stored.yes!r} and {stored.no!r}, this build "
            f"{template.yes!r} and {template.no!r}"
        )
    if template.readable() != stored.text:
        raise ContractError(
            f"template '{stored.name}' version {stored.version} differs: contract has {stored.text!r}, this build "
            f"has {template.readable()!r}"
        )
    return template


def check_tokenizer(contract: CheckpointContract, folder: Path | str) -> None:
    """Raise `ContractError` unless the folder's tokenizer is the contract's."""
    found = tokenizer_sha256(folder)
    if found != contract.tokenizer_sha256:
        raise ContractError(
            f"tokenizer of {folder} differs: contract has sha256 {contract.tokenizer_sha256[:16]}..., got {found[:16]}..."
        )


def check_head(contract: CheckpointContract, head: Head) -> None:
    """Raise `ContractError` unless the model is loaded with the contract's head."""
    if head is not contract.head:
        raise ContractError(
            f"head differs: contract has '{contract.head}', the model is loaded with '{head}'"
        )


def check_token_ids(contract: CheckpointContract, renderer: Renderer) -> None:
    """Raise `ContractError` at the first probe that renders to other token ids than the contract's."""
    for number, probe in enumerate(contract.probes):
        try:
            ids = renderer.render(probe.pair()).ids
        except PromptError as error:
            raise ContractError(f"probe {number} cannot be rendered: {error}") from error
        if ids == probe.token_ids:
            continue
        pairs = enumerate(zip(probe.token_ids, ids, strict=False))
        place = next(
            (at for at, (one, other) in pairs if one != other), min(len(ids), len(probe.token_ids))
        )
        raise ContractError(
            f"probe {number} (query {probe.query!r}) renders differently from token {place} on: contract "
            f"{probe.token_ids[place : place + 5]} of {len(probe.token_ids)} tokens, got {ids[place : place + 5]} of "
            f"{len(ids)}"
        )


def check_dtype(proved: Collection[str], dtype: str) -> None:
    """Raise `ContractError` for an arithmetic in which a checkpoint was never scored, by the keys of its tolerances."""
    if dtype not in {"float32", *proved}:
        raise ContractError(
            f"dtype: the contract has no tolerance for {dtype}: it was proved in {', '.join(sorted(proved))}"
        )


def tolerance_for(contract: CheckpointContract, *, dtype: Dtype) -> float:
    """Return the difference that passes in this arithmetic; in half precision at most half the scores' deviation."""
    if dtype == "float32":
        return contract.tolerance.get("float32", FP32_TOLERANCE)
    check_dtype(contract.tolerance, dtype)
    return min(
        contract.tolerance[dtype], _half_deviation([probe.score for probe in contract.probes])
    )


def check_scores(contract: CheckpointContract, scores: Sequence[float], *, dtype: Dtype) -> float:
    """Compare an engine's scores of the probes with the contract's; return the largest difference."""
    if len(scores) != len(contract.probes):
        raise ContractError(
            f"expected the scores of {len(contract.probes)} probes, got {len(scores)}"
        )
    allowed = tolerance_for(contract, dtype=dtype)
    largest = 0.0
    for number, (probe, score) in enumerate(zip(contract.probes, scores, strict=True)):
        difference = abs(score - probe.score)
        if not math.isfinite(score) or difference > allowed:
            raise ContractError(
                f"probe {number} (query {probe.query!r}) scores differently in {dtype}: contract {probe.score:.6f}, "
                f"got {score:.6f}, difference {difference:.6f}, allowed {allowed:.6f}"
            )
        largest = max(largest, difference)
    return largest


def measured_tolerance(reference: Sequence[float], scores: Sequence[float]) -> float:
    """Return the tolerance to store for a half-precision arithmetic that gave `scores` where training gave `reference`.

    Twice the largest difference seen, since kernels differ between engines; never over half the scores' deviation,
    and a `ContractError` where that arithmetic cannot tell the probes apart.
    """
    seen = max(abs(one - other) for one, other in zip(reference, scores, strict=True))
    most = _half_deviation(reference)
    if not seen <= most:
        raise ContractError(
            f"this arithmetic moves a probe's score by {seen:.6f}, more than half of the scores' deviation {2 * most:.6f}"
        )
    return max(min(2 * seen, most), min(FP32_TOLERANCE, most), 1e-12)


def _half_deviation(scores: Sequence[float]) -> float:
    return statistics.pstdev(scores) / 2


def check_request_prefixes(
    renderer: Renderer, *, query_prefix: str | None, passage_prefix: str | None
) -> None:
    """Raise `PromptError` where a request asks for another prefix than the one that the model was trained with."""
    given = {"query_prefix": query_prefix, "passage_prefix": passage_prefix}
    own = {"query_prefix": renderer.query_prefix, "passage_prefix": renderer.passage_prefix}
    always_sent = {"query_prefix": DEFAULT_QUERY_PREFIX, "passage_prefix": DEFAULT_PASSAGE_PREFIX}
    for what, prefix in given.items():
        # The reference's client sends its defaults whatever the template; one without a place for them ignores them.
        ignored = renderer.template.query_prefix is None and prefix == always_sent[what]
        if prefix is not None and prefix != own[what] and not ignored:
            raise PromptError(
                f"{what} differs: this scorer was trained with {own[what]!r}, the request has {prefix!r}"
            )
