"""Wire types of `/rerank`, `/v1/rerank` and `/v2/rerank`: one query and its documents, best first.

One request type takes what Cohere's (v1 and v2), Jina's and vLLM's clients send; TEI's, told by `texts`, is another.
What these services know and this one would have to ignore is refused by name, unless it leaves the scores alone.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tevatron.core.contracts.jobs import Spec
from tevatron.core.contracts.scores import MAX_CANDIDATES, Text

_REFUSED = {
    "max_chunks_per_doc": "a document is scored once, not in chunks; see max_tokens_per_doc",
    "relevant_spans": "documents are scored as a whole",
    "rank_fields": "a document's title and text are scored, nothing else",
    "max_tokens_per_query": "a query is never shortened",
    "truncate_prompt_tokens": "it would cut the end of the prompt; see max_tokens_per_doc",
    "truncation_side": "a passage is cut at its end",
    "chat_template_kwargs": "the prompt template is the checkpoint's",
    "add_special_tokens": "the prompt template is the checkpoint's",
    "mm_processor_kwargs": "only text is scored",
    "additional_data": "only text is scored",
}


class Document(BaseModel):
    """A document as an object: other fields than these are the client's own and are not read."""

    model_config = ConfigDict(frozen=True)

    text: Text
    title: Text = ""


class RerankRequest(Spec):
    """Body of the rerank paths, in the forms of Cohere, Jina and vLLM."""

    query: Text
    documents: list[Text | Document] = Field(min_length=1, max_length=MAX_CANDIDATES)
    model: str | None = None
    """Taken as it comes: one scorer serves one model, which the answer names."""
    top_n: int | None = Field(default=None, ge=0)
    """How many come back; all with 0 or none."""
    return_documents: bool | None = None
    """Whether texts come back; when unset, they do but on `/v2/rerank`, as Jina and vLLM do and Cohere does not."""
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    """Tokens to which each document's text is cut before it is put into the prompt."""
    raw_scores: bool = False
    """Whether `relevance_score` is the score itself; its sigmoid otherwise."""
    use_activation: bool | None = None
    """vLLM's name for the opposite of `raw_scores`."""
    instruction: str | None = None
    """Must be the prompt template's own where it has one; another one is refused."""
    priority: int = 0
    """Without effect: requests get fair shares."""
    user: str | None = None
    """Without effect."""
    request_id: str | None = Field(default=None, max_length=200)
    """The answer's `id`; one is made when unset."""
    max_chunks_per_doc: None = None
    rank_fields: None = None
    relevant_spans: None = None
    max_tokens_per_query: None = None
    truncate_prompt_tokens: None = None
    truncation_side: None = None
    chat_template_kwargs: None = None
    add_special_tokens: None = None
    mm_processor_kwargs: None = None
    additional_data: None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, values: object) -> object:
        if isinstance(values, dict):
            for name, why in _REFUSED.items():
                if values.get(name) is not None:
                    raise ValueError(f"'{name}' is not supported: {why}")
        return values

    @model_validator(mode="after")
    def _one_form_of_score(self) -> Self:
        if self.raw_scores and self.use_activation:
            raise ValueError("'raw_scores' and 'use_activation' ask for different scores")
        return self

    @property
    def wants_raw(self) -> bool:
        """Whether scores come back as they are."""
        return self.raw_scores or self.use_activation is False


class ReturnedDocument(Spec):
    """A document's text, given back."""

    text: str


class RerankResult(Spec):
    """One document of the answer."""

    index: int
    """Its place in the request."""
    relevance_score: float = Field(allow_inf_nan=False)
    document: ReturnedDocument | None = None
    truncated_tokens: int = 0
    """Tokens of the document that were not scored."""


class Usage(Spec):
    """Tokens of all prompts, as Jina and vLLM count them."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(Spec):
    """Part of Cohere's answer."""

    version: str


class BilledUnits(Spec):
    """Part of Cohere's answer: one search unit a request."""

    search_units: int = 1


class Meta(Spec):
    """Part of Cohere's answer."""

    api_version: ApiVersion
    billed_units: BilledUnits = Field(default_factory=BilledUnits)


class RerankResponse(Spec):
    """Answer of the rerank paths: best first, and the order of the request where scores are equal."""

    id: str
    object: Literal["list"] = "list"
    model: str
    """What is served, whatever the request named."""
    results: list[RerankResult]
    usage: Usage
    meta: Meta


class TeiRerankRequest(Spec):
    """Body of `/rerank` in the form of text-embeddings-inference."""

    query: Text
    texts: list[Text]
    raw_scores: bool = False
    return_text: bool = False
    top_n: int | None = Field(default=None, ge=0)
    """Not TEI's own, but what litellm sends in this form."""
    truncate: bool | None = None
    """False refuses texts that are too long; otherwise their end is cut."""
    truncation_direction: Annotated[str, Field(pattern="^[Rr]ight$")] = "Right"


class TeiRank(Spec):
    """One text of the answer."""

    index: int
    score: float = Field(allow_inf_nan=False)
    text: str | None = None
    truncated_tokens: int | None = None
    """Only where something was cut."""


class TeiError(Spec):
    """TEI's errors."""

    error: str
    error_type: Literal["Validation", "Tokenizer", "Backend", "Overloaded", "Unhealthy"]
