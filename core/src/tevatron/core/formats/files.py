"""Reading data files: plain, gzip or zstd, UTF-8 with or without BOM, any line ending; and hashing files and folders.

Owns what all formats share: numbered lines, JSON lines, and typed fields whose errors name file, line and field.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, cast

from tevatron.core.errors import FormatError

_GZIP, _ZSTD, _BOM = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**20
_BLOCK_BYTES = 2**15
"""Enough lines that a block costs nothing, few enough that their texts do not count beside what is made of them."""
MAX_LINE_BYTES = 64 * 2**20
FREE_BYTES = 256 * 2**20
MAX_RATIO = 200
"""A file that unpacks to more than `FREE_BYTES` may have this many times its size; text has some 20 times at most."""

JsonObject = dict[str, object]


@contextmanager
def open_bytes(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed by its first bytes, not by its name."""
    path = Path(path)
    if not path.is_file():
        raise FormatError("no such file" if not path.exists() else "not a file", path=path)
    with path.open("rb") as raw:
        start = raw.read(4)
        raw.seek(0)
        if start.startswith(_GZIP):
            with gzip.open(raw) as stream:
                yield cast("IO[bytes]", stream)
        elif start == _ZSTD:
            import zstandard  # heavy and rarely needed: kept out of every other reader's start

            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as frames:
                yield io.BufferedReader(cast("io.RawIOBase", frames), _CHUNK_BYTES)
        else:
            yield raw


@contextmanager
def open_text(path: Path | str) -> Iterator[IO[str]]:
    """Open a file as text: UTF-8, a BOM skipped, all line endings read as a newline."""
    with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
        yield text


class Line(NamedTuple):
    """A line without its ending, and its number from 1."""

    number: int
    text: str


class Block(NamedTuple):
    """Lines without their endings, blank ones too, and the number of the first from 1."""

    number: int
    lines: list[str]
    is_ascii: bool


def read_lines(path: Path | str) -> Iterator[Line]:
    """Yield the lines that are not blank; bytes that are not UTF-8 or a broken archive are a `FormatError`."""
    for block in read_blocks(path):
        for number, text in enumerate(block.lines, start=block.number):
            if text and not text.isspace():
                yield Line(number, text)


def read_blocks(path: Path | str) -> Iterator[Block]:
    """Yield a file's lines some hundred at a time, for readers that are quick only on many; errors as `read_lines`."""
    number = 1
    try:
        with open_bytes(path) as stream:
            for data in _whole_lines(stream, path):
                lines, broken = _decode(data, path, number)
                yield Block(number, lines, data.isascii())
                if broken is not None:
                    raise broken
                number += len(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"broken gzip archive: {error}", path=path, line=number) from error
    except Exception as error:
        # zstandard is not imported unless a file needs it, so its error is known by its module.
        if type(error).__module__.partition(".")[0] not in {"zstandard", "zstd"}:
            raise
        raise FormatError(f"broken zstd archive: {error}", path=path, line=number) from error


def _whole_lines(stream: IO[bytes], path: Path | str) -> Iterator[bytes]:
    """Yield runs of whole lines without the last newline; a small archive that would fill the memory is refused."""
    limit = max(FREE_BYTES, MAX_RATIO * Path(path).stat().st_size)
    total, number, rest = 0, 1, b""
    for read in iter(lambda: stream.read(_BLOCK_BYTES), b""):
        data = read.removeprefix(_BOM) if total == 0 else read
        total += len(read)
        if total > limit:
            raise FormatError(
                f"the file unpacks to more than {MAX_RATIO} times its size", path=path, line=number
            )
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            yield _checked(rest + head, path, number)
            number += head.count(b"\n") + 1
            rest = tail
        else:
            rest += tail
        _checked(rest, path, number)
    if rest:
        yield rest


def _checked(data: bytes, path: Path | str, number: int) -> bytes:
    """Return `data`, none of whose lines may be over the limit."""
    if len(data) > MAX_LINE_BYTES:
        for place, line in enumerate(data.split(b"\n")):
            if len(line) > MAX_LINE_BYTES:
                message = f"the line is longer than {MAX_LINE_BYTES} bytes"
                raise FormatError(message, path=path, line=number + place)
    return data


def _decode(data: bytes, path: Path | str, number: int) -> tuple[list[str], FormatError | None]:
    """Return the lines of `data`; those before bytes that are not UTF-8, and the error, where there are such bytes."""
    broken = None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        broken = FormatError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start - start} of the line",
            path=path,
            line=number + data.count(b"\n", 0, start),
        )
        text = data[:start].decode()
    lines = text.split("\n")
    if "\r" in text:
        lines = [line.rstrip("\r") for line in lines]
    return lines, broken


class Record:
    """One JSON object of a file; its readers raise `FormatError` with file, line and field."""

    def __init__(
        self, fields: JsonObject, *, path: Path | str, line: int, within: str = ""
    ) -> None:
        self._fields = fields
        self.path = path
        self.line = line
        self._within = within

    def fail(self, message: str, field: str | None = None) -> NoReturn:
        """Raise a `FormatError` at this record."""
        name = (
            f"{self._within}.{field}" if self._within and field else field or self._within or None
        )
        raise FormatError(message, path=self.path, line=self.line, field=name)

    def has(self, field: str) -> bool:
        """Say whether the field is there and not null."""
        return self._fields.get(field) is not None

    def text(self, field: str, *, default: str | None = None) -> str:
        """Return a string field; null and absent are the default, an error where there is none."""
        value = self._fields.get(field)
        if value is None:
            if default is None:
                self.fail(
                    f"expected a string, got {'null' if field in self._fields else 'nothing'}",
                    field,
                )
            return default
        if not isinstance(value, str):
            self.fail(f"expected a string, got {_kind(value)}", field)
        if not _is_unicode(value):
            self.fail("contains half of a surrogate pair, which is no character", field)
        return value

    def identifier(self, field: str, *, default: str | None = None) -> str:
        """Return an id as a string; numbers are written out, empty ids and ids with NUL are errors."""
        value = self._fields.get(field)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        text = self.text(field, default=default)
        if not text or "\x00" in text:
            self.fail(
                "expected an id, got an empty string" if not text else "an id cannot contain NUL",
                field,
            )
        return text

    def number(self, field: str) -> float:
        """Return a finite number."""
        return self.as_number(self._fields.get(field), field)

    def as_number(self, value: object, field: str) -> float:
        """Return `value` as a finite number, or fail at `field`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"expected a number, got {_kind(value)}", field)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {number}", field)
        return number

    def values(self, field: str, *, required: bool = True) -> list[object]:
        """Return a list field; absent is empty unless it is required."""
        value = self._fields.get(field)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            self.fail(
                f"expected a list, got {_kind(value) if field in self._fields else 'nothing'}",
                field,
            )
        return cast("list[object]", value)

    def record(self, field: str) -> Record:
        """Return an object."""
        value = self._fields.get(field)
        if not isinstance(value, dict):
            self.fail(
                f"expected an object, got {_kind(value) if field in self._fields else 'nothing'}",
                field,
            )
        name = f"{self._within}.{field}" if self._within else field
        return Record(value, path=self.path, line=self.line, within=name)

    def records(self, field: str, *, required: bool = True) -> list[Record]:
        """Return a list of objects."""
        found = []
        for place, value in enumerate(self.values(field, required=required)):
            name = f"{self._within}.{field}[{place}]" if self._within else f"{field}[{place}]"
            if not isinstance(value, dict):
                self.fail(f"expected an object, got {_kind(value)}", f"{field}[{place}]")
            found.append(Record(value, path=self.path, line=self.line, within=name))
        return found


def read_json_lines(path: Path | str) -> Iterator[Record]:
    """Yield the objects of a JSON Lines file."""
    for line in read_lines(path):
        start = _after_space(line.text, 0)
        value, end = _json_value(line.text, start, path=path, line=line.number)
        if line.text[end:].strip():
            raise FormatError(
                f"not JSON: Extra data at column {end + 1}", path=path, line=line.number
            )
        yield _object(value, path=path, line=line.number)


def read_json_array(path: Path | str) -> Iterator[Record]:
    """Yield the objects of a file that is one JSON array; it is held in memory whole."""
    text = "\n".join(line for block in read_blocks(path) for line in block.lines)
    place, line = _after_space(text, text.find("[") + 1), 1
    counted = 0
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        value, end = _json_value(text, place, path=path, line=line)
        yield _object(value, path=path, line=line)
        place = _after_space(text, end)
        if text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif text[place : place + 1] != "]":
            line += text.count("\n", counted, place)
            raise FormatError("not JSON: expected ',' or ']' in the array", path=path, line=line)
    if text[place + 1 :].strip():
        raise FormatError("not JSON: extra data behind the array", path=path)


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _json_value(text: str, place: int, *, path: Path | str, line: int) -> tuple[object, int]:
    """Decode the value at `place`; return it and where it ends."""
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        line += text.count("\n", place, error.pos)
        raise FormatError(
            f"not JSON: {error.msg} at column {error.colno}", path=path, line=line
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON that can be read: {error}", path=path, line=line) from error


def _object(value: object, *, path: Path | str, line: int) -> Record:
    if not isinstance(value, dict):
        raise FormatError(f"expected an object, got {_kind(value)}", path=path, line=line)
    return Record(value, path=path, line=line)


_DECODER = json.JSONDecoder()
"""Reads NaN and Infinity, so that the reader of a number can name the field; nothing else takes them."""


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def sha256_file(path: Path | str) -> str:
    """Hash a file's bytes as they lie on disk."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_tree(folder: Path | str) -> str:
    """Hash a folder: relative names and contents of its files, in the order of the names."""
    root = Path(folder)
    total = hashlib.sha256()
    files = (path for path in root.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        total.update(f"{path.relative_to(root).as_posix()}\0{sha256_file(path)}\n".encode())
    return total.hexdigest()
