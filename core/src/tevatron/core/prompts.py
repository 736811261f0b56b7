"""Prompt templates: the one place that turns a query and a passage into token ids.

Owns the registry of named, versioned templates, their rendering with any tokenizer and length, truncation, and the
ids of the answer tokens. Training, serving and evaluation all render through it. Knows no model and no file.

Truncation shortens the passage only: a prompt is always the encoding of one string, `before + passage + after`, and
where that is too long, of the same string with fewer of the passage's tokens at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from tevatron.core.errors import EmptyPromptError, PromptError, QueryTooLongError, unknown_name

DEFAULT_QUERY_PREFIX = "query:"
DEFAULT_PASSAGE_PREFIX = "passage:"
_MOST_JOINED = 16
"""Cuts tried for one long pair before one is taken whose end joins the template's own text."""


class Encoding(Protocol):
    """What a tokenizer call returns; the keys used are `input_ids` and `offset_mapping`."""

    def __getitem__(self, key: str, /) -> list[int] | list[tuple[int, int]]:
        """Return ids, or (start, end) characters by token."""


class _Encoded(Protocol):
    @property
    def ids(self) -> list[int]: ...


class _Backend(Protocol):
    """The part of the tokenizers library's own class that rendering needs."""

    def encode_batch_fast(self, texts: list[str], /, *, add_special_tokens: bool) -> list[_Encoded]:
        """Encode many texts, without the characters of their tokens."""


class Tokenizer(Protocol):
    """The part of transformers' fast tokenizers that rendering needs."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""

    @property
    def backend_tokenizer(self) -> _Backend:
        """Return what does the work."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of one text."""

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool
    ) -> Encoding:
        """Encode a text, with the characters of each token if asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A query and a passage."""

    query: str
    text: str
    title: str = ""
    instruction: str | None = None
    """What counts as relevant, in place of the template's own words; for a template that has some."""


class Rendered(NamedTuple):
    """Token ids of a prompt, and how many tokens of its passage did not fit."""

    ids: list[int]
    truncated_tokens: int


class AnswerIds(NamedTuple):
    """Ids of the two answers, as they follow the prompt."""

    yes: int
    no: int


class Parts(NamedTuple):
    """A prompt's string in three: only `passage` may be shortened."""

    before: str
    passage: str
    after: str


Write = Callable[[Pair, str, str], Parts]
"""Writes a pair with a query prefix and a passage prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How a pair is written, and which answers are compared."""

    name: str
    version: int
    write: Write
    yes: str | None
    """The answer that means relevant; None where a head gives the score."""
    no: str | None
    query_prefix: str | None = DEFAULT_QUERY_PREFIX
    """Prefix unless one is given; None where the template has no place for one."""
    passage_prefix: str | None = DEFAULT_PASSAGE_PREFIX
    special_tokens: bool = True
    """Whether the tokenizer adds its own special tokens (BOS) around the prompt."""
    instruction: str | None = None
    """Its words for what counts as relevant; None where the template has no place for them."""

    def readable(self) -> str:
        """Return the template as a person reads it, with `{slots}`."""
        pair = Pair(query="{query}", title="{title}", text="{text}")
        prefixes = (
            ("{query_prefix}", "{passage_prefix}") if self.query_prefix is not None else ("", "")
        )
        return "".join(self.write(pair, *prefixes))


def _strip_around(before: str, passage: str) -> tuple[str, str]:
    """Strip `before + passage` as one string, keeping the border between them."""
    joined = before + passage
    lead = len(joined) - len(joined.lstrip())
    stripped = joined.strip()
    border = min(max(0, len(before) - lead), len(stripped))
    return stripped[:border], stripped[border:]


def _write_pair(pair: Pair, query_prefix: str, passage_prefix: str) -> Parts:
    # The reference's format_pair to the letter: hyphens of a title become blanks, an empty title leaves two blanks.
    title = pair.title.replace("-", " ").strip()
    before, passage = _strip_around(
        f"{query_prefix} {pair.query} {passage_prefix} ", f"{title} {pair.text}"
    )
    return Parts(before, passage, "")


def _write_tevatron(pair: Pair, query_prefix: str, passage_prefix: str) -> Parts:
    before, passage, _ = _write_pair(pair, query_prefix, passage_prefix)
    return Parts(before, passage, "\nIs the passage relevant to the query?")


def _write_relevant(pair: Pair, query_prefix: str, passage_prefix: str) -> Parts:
    # The paper prints "relevant: ," where its query, passage and answers stood in angle brackets.
    words = [query_prefix, pair.query.strip(), passage_prefix]
    before = " ".join(word for word in words if word)
    passage = " ".join(word for word in (pair.title.strip(), pair.text.strip()) if word)
    return Parts(f"{before} ", passage, " relevant:")


_QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: "
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def _write_qwen3(pair: Pair, _query_prefix: str, _passage_prefix: str) -> Parts:
    passage = f"{pair.title.strip()} {pair.text}".strip()
    instruction = _QWEN3_INSTRUCTION if pair.instruction is None else pair.instruction
    before = f"{_QWEN3_BEFORE}{instruction}\n<Query>: {pair.query}\n<Document>: "
    return Parts(before, passage, _QWEN3_AFTER)


TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(name="tevatron", version=1, write=_write_tevatron, yes=" yes", no=" no"),
        Template(
            name="qwen3_reranker",
            version=1,
            write=_write_qwen3,
            yes="yes",
            no="no",
            query_prefix=None,
            passage_prefix=None,
            special_tokens=False,
            instruction=_QWEN3_INSTRUCTION,
        ),
        Template(
            name="relevant",
            version=1,
            write=_write_relevant,
            yes=" yes",
            no=" no",
            query_prefix="",
            passage_prefix="",
        ),
        Template(name="pair", version=1, write=_write_pair, yes=None, no=None),
    )
}


def get_template(name: str) -> Template:
    """Return the template of that name; an unknown one is a `PromptError` that lists them."""
    if name not in TEMPLATES:
        raise PromptError(unknown_name("prompt template", name, TEMPLATES))
    return TEMPLATES[name]


class Renderer:
    """Renders pairs with one template, one tokenizer and one length."""

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        append_eos: bool = False,
    ) -> None:
        self.template = template
        self.max_length = max_length
        self.append_eos = append_eos
        self.query_prefix = _prefix("query_prefix", query_prefix, template.query_prefix, template)
        self.passage_prefix = _prefix(
            "passage_prefix", passage_prefix, template.passage_prefix, template
        )
        self._tokenizer = tokenizer
        self._end = _end_ids(template, tokenizer) if append_eos else []
        self._room = max_length - len(self._end)
        self._after_ids = self._ids_after()
        self.answer_ids = self._resolve_answers()

    def text(self, pair: Pair) -> str:
        """Return the whole prompt's string, nothing cut."""
        return "".join(self.template.write(pair, self.query_prefix, self.passage_prefix))

    def render(self, pair: Pair) -> Rendered:
        """Return the pair's token ids, at least one and at most `max_length`.

        Raises:
            QueryTooLongError: The query leaves no room for the passage.
            EmptyPromptError: There are no tokens.
        """
        return self._fit(pair, self._encode(self.text(pair)))

    def render_all(self, pairs: Sequence[Pair]) -> list[Rendered]:
        """Render many pairs; the same as `render` of each, faster."""
        if not pairs:
            return []
        encoded = self._encode_all([self.text(pair) for pair in pairs])
        return [self._fit(pair, ids) for pair, ids in zip(pairs, encoded, strict=True)]

    def cut_text(self, pair: Pair, *, max_tokens: int) -> tuple[Pair, int]:
        """Return the pair with its text cut to so many tokens of its own, and how many were cut."""
        encoding = self._tokenizer(pair.text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[tuple[int, int]] = encoding["offset_mapping"]  # type: ignore[assignment]  # as in render_all
        if len(offsets) <= max_tokens:
            return pair, 0
        text = pair.text[: offsets[max_tokens - 1][1]]
        return replace(pair, text=text), len(offsets) - max_tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=self.template.special_tokens))

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        # transformers' own call holds Python for three times as long, to make what nobody reads; a call of it for
        # nothing leaves the library below as it would have it, without truncation and padding.
        self._encode("")
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(
            texts, add_special_tokens=self.template.special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def _fit(self, pair: Pair, ids: list[int]) -> Rendered:
        if not ids and not self._end:
            raise EmptyPromptError(
                f"the prompt has no tokens: expected a query, a text or prefixes for template '{self.template.name}', "
                f"got query {pair.query!r}, title {pair.title!r}, text {pair.text!r}"
            )
        if len(ids) <= self._room:
            return Rendered(ids + self._end, 0)
        cut = self._shorten(pair)
        return Rendered(cut + self._end, len(ids) - len(cut))

    def _shorten(self, pair: Pair) -> list[int]:
        """Encode the prompt again with the passage shortened; white space before it goes first where it fills the room."""
        before, passage, after = self.template.write(pair, self.query_prefix, self.passage_prefix)
        ids = self._cut(before, passage, after)
        if ids is None and passage[:1].isspace():
            ids = self._cut(before, passage.lstrip(), after)
        if ids is None:
            raise self._query_too_long(pair, len(self._encode(before + after)))
        return ids

    def _cut(self, before: str, passage: str, after: str) -> list[int] | None:
        """Encode the prompt with the passage cut at the last of its tokens' ends that fits; None where nothing is left.

        A token may join the passage's last characters to the template's first ones ("?" + newline); a cut that keeps
        the template's own ids is preferred, and found a token or two earlier except in a passage of nothing else.
        """
        encoding = self._tokenizer(
            before + passage + after,
            add_special_tokens=self.template.special_tokens,
            return_offsets_mapping=True,
        )
        offsets: list[tuple[int, int]] = encoding["offset_mapping"]  # type: ignore[assignment]  # as above
        whole: list[int] = encoding["input_ids"]  # type: ignore[assignment]  # as above
        if len(whole) <= self._room:
            return list(whole)
        first, last = len(before), len(before) + len(passage)
        ends = [end for _, end in offsets if first < end <= last]
        kept = len(ends) - (len(whole) - self._room)
        joined: list[list[int]] = []
        while kept > 0 and len(joined) < _MOST_JOINED:
            shortened = passage[: ends[kept - 1] - first].rstrip()
            if not shortened:
                break
            ids = self._encode(before + shortened + after)
            if len(ids) <= self._room:
                if ids[len(ids) - len(self._after_ids) :] == self._after_ids:
                    return ids
                joined.append(ids)
            kept -= max(1, len(ids) - self._room)
        return joined[0] if joined else None

    def _query_too_long(self, pair: Pair, num_tokens: int) -> QueryTooLongError:
        shown = pair.query if len(pair.query) <= 60 else f"{pair.query[:57]}..."
        num_query = len(self._tokenizer.encode(pair.query, add_special_tokens=False))
        return QueryTooLongError(
            f"query {shown!r} ({len(pair.query)} characters, {num_query} tokens) leaves no room for a passage: the "
            f"prompt takes {num_tokens} tokens without one, max_length is {self.max_length}"
        )

    def _probe(self) -> str:
        before, passage, _ = self.template.write(
            Pair(query="a", text="b"), self.query_prefix, self.passage_prefix
        )
        return before + passage

    def _ids_after(self) -> list[int]:
        """Return the ids of the text after the passage, as they stand behind a passage."""
        after = self.template.write(Pair(query="", text=""), "", "").after
        if not after:
            return []
        probe = self._probe()
        without, whole = self._encode(probe), self._encode(probe + after)
        if whole[: len(without)] != without:
            raise PromptError(
                f"template '{self.template.name}' needs a tokenizer that adds nothing at the end of a text and "
                f"splits before {after[:20]!r}: {probe!r} is {without}, with the template's end {whole}"
            )
        return whole[len(without) :]

    def _resolve_answers(self) -> AnswerIds | None:
        if self.template.yes is None or self.template.no is None:
            return None
        prompt = self.text(Pair(query="a", text="b"))
        return AnswerIds(
            self._answer_id(prompt, self.template.yes), self._answer_id(prompt, self.template.no)
        )

    def _answer_id(self, prompt: str, answer: str) -> int:
        ids, whole = self._encode(prompt), self._encode(prompt + answer)
        rest = whole[len(ids) :]
        if whole[: len(ids)] != ids or len(rest) != 1:
            shown = rest if whole[: len(ids)] == ids else whole[max(0, len(ids) - 2) :]
            raise PromptError(
                f"answer {answer!r} of template '{self.template.name}' must be one token of its own after the "
                f"prompt, got ids {shown}"
            )
        return rest[0]


def _prefix(what: str, given: str | None, default: str | None, template: Template) -> str:
    if default is None:
        if given:
            raise PromptError(
                f"template '{template.name}' has no place for a {what}, got {given!r}"
            )
        return ""
    return default if given is None else given


def _end_ids(template: Template, tokenizer: Tokenizer) -> list[int]:
    if template.yes is not None:
        raise PromptError(
            f"append_eos_token needs the template 'pair': '{template.name}' reads its answer right after the prompt"
        )
    if tokenizer.eos_token_id is None:
        raise PromptError("append_eos_token is set, but the tokenizer has no EOS token")
    return [tokenizer.eos_token_id]
