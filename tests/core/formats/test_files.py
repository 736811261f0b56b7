import gzip
import hashlib

import pytest
import zstandard

from tevatron.core.errors import FormatError
from tevatron.core.formats import files
from tevatron.core.formats.files import (
    Line,
    open_text,
    read_blocks,
    read_json_array,
    read_json_lines,
    read_lines,
    sha256_file,
    sha256_tree,
)


def _write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "pack",
    [lambda content: content, gzip.compress, zstandard.ZstdCompressor().compress],
    ids=["plain", "gz", "zst"],
)
def test_lines_with_bom_crlf_blank_lines_and_no_last_newline(tmp_path, pack):
    path = _write(tmp_path / "data", pack(b"\xef\xbb\xbfone\r\n\n  \ntwo\x0bhalf\xe2\x80\xa8end"))
    assert list(read_lines(path)) == [Line(1, "one"), Line(4, "two\x0bhalf\u2028end")]


def test_compression_is_told_by_content_not_by_name(tmp_path):
    assert list(read_lines(_write(tmp_path / "plain.gz", b"one\n"))) == [Line(1, "one")]


def test_archives_of_several_parts_are_read_whole(tmp_path):
    pack = zstandard.ZstdCompressor().compress
    assert len(list(read_lines(_write(tmp_path / "a.zst", pack(b"one\n") + pack(b"two\n"))))) == 2
    assert (
        len(
            list(
                read_lines(_write(tmp_path / "a.gz", gzip.compress(b"1\n") + gzip.compress(b"2\n")))
            )
        )
        == 2
    )


def test_open_text_reads_all_endings_as_newlines(tmp_path):
    with open_text(_write(tmp_path / "a", b"\xef\xbb\xbfone\r\ntwo")) as stream:
        assert stream.read() == "one\ntwo"


def test_bytes_that_are_not_utf8_name_the_line(tmp_path):
    with pytest.raises(FormatError, match=r"a:2: not UTF-8: byte 0xff at byte 3 of the line"):
        list(read_lines(_write(tmp_path / "a", b"ok\nbad\xff\n")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"one\n" * 10_000)[:-20], "broken gzip archive"),
        (gzip.compress(b"one\n")[:-8] + b"\0" * 8, "broken gzip archive"),
        (
            zstandard.ZstdCompressor(write_checksum=True).compress(b"one\n")[:-1] + b"\0",
            "broken zstd archive",
        ),
    ],
    ids=["gzip, cut off", "gzip, other checksum", "zstd, other checksum"],
)
def test_a_broken_archive_is_a_format_error(tmp_path, content, message):
    with pytest.raises(FormatError, match=message):
        list(read_lines(_write(tmp_path / "a", content)))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FormatError, match=r"gone: no such file"):
        list(read_lines(tmp_path / "gone"))
    with pytest.raises(FormatError, match="not a file"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', r"a:17: not JSON: Expecting ',' delimiter at column 8"),
        ("[1]", "a:17: expected an object, got a list"),
        ("[" * 100_000, "a:17: not JSON that can be read"),
        ('{"a": ' + "1" * 5000 + "}", "a:17: not JSON that can be read"),
    ],
)
def test_broken_json_at_line_17(tmp_path, line, message):
    path = tmp_path / "a"
    path.write_text('{"a": 1}\n' * 16 + line + "\n")
    with pytest.raises(FormatError, match=message):
        list(read_json_lines(path))


def test_an_array_gives_its_objects_with_their_lines(tmp_path):
    path = _write(tmp_path / "a", b'\xef\xbb\xbf [ {"a": "x"},\r\n{"a":\n"y"}\n, {"a": "z"} ]\n')
    found = [(record.line, record.text("a")) for record in read_json_array(path)]
    assert found == [(1, "x"), (2, "y"), (4, "z")]
    assert list(read_json_array(_write(tmp_path / "b", b"[ ]"))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}\n{"a": 2}]', r"a:2: not JSON: expected ',' or '\]' in the array"),
        ('[{"a": 1}', r"a:1: not JSON: expected ',' or '\]' in the array"),
        ('[{"a": 1},\n{"a" 2}]', "a:2: not JSON: Expecting ':' delimiter"),
        ("[\n\n1]", "a:3: expected an object, got a number"),
        ("[", "a:1: not JSON: Expecting value"),
        ("[] []", "a: not JSON: extra data behind the array"),
    ],
)
def test_a_broken_array_is_named(tmp_path, text, message):
    with pytest.raises(FormatError, match=message):
        list(read_json_array(_write(tmp_path / "a", text.encode())))


def test_lines_before_bytes_that_are_not_utf8_are_there(tmp_path):
    lines = read_lines(_write(tmp_path / "a", b"one\ntwo\n\xfe\nfour\n"))
    assert [next(lines), next(lines)] == [Line(1, "one"), Line(2, "two")]
    with pytest.raises(FormatError, match="a:3: not UTF-8: byte 0xfe at byte 0"):
        next(lines)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_across_many_chunks_are_whole(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 7)
    lines = ["x" * n for n in range(1, 40)]
    path = _write(tmp_path / "a", pack("\n".join(lines).encode()))
    assert list(read_lines(path)) == [Line(n, text) for n, text in enumerate(lines, start=1)]
    blocks = list(read_blocks(path))
    assert [block.number for block in blocks][-1] == 40 - len(blocks[-1].lines)
    assert blocks[0].is_ascii


def _record(tmp_path, text):
    path = tmp_path / "a"
    path.write_text(text)
    return next(read_json_lines(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "field 'f': expected a string, got nothing"),
        ('{"f": null}', "field 'f': expected a string, got null"),
        ('{"f": 3}', "field 'f': expected a string, got a number"),
        ('{"f": true}', "field 'f': expected a string, got a boolean"),
        (r'{"f": "\ud83d"}', "field 'f': contains half of a surrogate pair"),
    ],
)
def test_text_fields(tmp_path, text, message):
    with pytest.raises(FormatError, match=message):
        _record(tmp_path, text).text("f")


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    assert _record(tmp_path, r'{"f": "\ud83d\ude00"}').text("f") == "😀"


def test_identifiers_become_strings(tmp_path):
    assert _record(tmp_path, '{"f": 7}').identifier("f") == "7"
    assert _record(tmp_path, '{"f": "x#1"}').identifier("f") == "x#1"
    assert _record(tmp_path, "{}").identifier("f", default="9") == "9"


@pytest.mark.parametrize("value", ['""', "true", "1.5", "[]", r'"a\u0000b"'])
def test_what_is_no_identifier(tmp_path, value):
    with pytest.raises(FormatError, match="field 'f'"):
        _record(tmp_path, f'{{"f": {value}}}').identifier("f")


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null"]
)
def test_what_is_no_finite_number(tmp_path, value):
    with pytest.raises(FormatError, match=r"field 'f': expected a (finite )?number, got"):
        _record(tmp_path, f'{{"f": {value}}}').number("f")


def test_hashes_of_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    _write(tmp_path / "b", b"1")
    _write(tmp_path / "sub" / "a", b"2")
    one, two = hashlib.sha256(b"1").hexdigest(), hashlib.sha256(b"2").hexdigest()
    assert sha256_file(tmp_path / "b") == one
    assert sha256_tree(tmp_path) == hashlib.sha256(f"b\0{one}\nsub/a\0{two}\n".encode()).hexdigest()
    before = sha256_tree(tmp_path)
    (tmp_path / "b").rename(tmp_path / "c")
    assert sha256_tree(tmp_path) != before


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    fits = _write(tmp_path / "fits.gz", gzip.compress(b"x" * 999 + b"\n" + b"y" * 1000))
    assert [len(line.text) for line in read_lines(fits)] == [999, 1000]
    bomb = _write(tmp_path / "bomb.gz", gzip.compress(b"short\n" + b"0" * 10**7))
    with pytest.raises(FormatError, match=r"bomb.gz:2: the line is longer than 1000 bytes"):
        list(read_lines(bomb))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_small_archive_of_endless_lines_is_refused(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(files, "FREE_BYTES", 2**20)
    path = tmp_path / "many.jsonl"
    path.write_bytes(pack(b"{}\n" * 10**6))
    with pytest.raises(FormatError, match="unpacks to more than 200 times its size"):
        for _ in read_lines(path):
            pass
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"{}\n" * 10**6)
    assert sum(1 for _ in read_lines(plain)) == 10**6
