"""Cells of a matrix, and what the expressions make of a template in them."""

from __future__ import annotations

import pytest
import yaml

from tevatron.core.cli.matrix import expand, fill, read_matrix
from tevatron.core.errors import ConfigError


def cells(text: str):
    return read_matrix(yaml.safe_load(text)).cells


def test_cells_are_all_combinations_in_the_files_order():
    assert cells("{size: [s, m], loss: [kl, ce]}") == [
        {"size": "s", "loss": "kl"},
        {"size": "s", "loss": "ce"},
        {"size": "m", "loss": "kl"},
        {"size": "m", "loss": "ce"},
    ]


def test_include_is_that_of_github_actions():
    # The example of "Expanding or adding matrix configurations" in GitHub's documentation, with its result.
    assert cells("""
        fruit: [apple, pear]
        animal: [cat, dog]
        include:
          - color: green
          - {color: pink, animal: cat}
          - {fruit: apple, shape: circle}
          - fruit: banana
          - {fruit: banana, animal: cat}
    """) == [
        {"fruit": "apple", "animal": "cat", "color": "pink", "shape": "circle"},
        {"fruit": "apple", "animal": "dog", "color": "green", "shape": "circle"},
        {"fruit": "pear", "animal": "cat", "color": "pink"},
        {"fruit": "pear", "animal": "dog", "color": "green"},
        {"fruit": "banana"},
        {"fruit": "banana", "animal": "cat"},
    ]


def test_exclude_drops_the_cells_that_match_in_part_before_include_adds_any():
    # GitHub's example: 3 * 2 * 2 combinations less macos-12-12-production and both of windows-16.
    found = cells("""
        os: [macos, windows]
        version: [12, 14, 16]
        environment: [staging, production]
        exclude:
          - {os: macos, version: 12, environment: production}
          - {os: windows, version: 16}
        include:
          - {os: windows, version: 16, environment: staging}
    """)
    assert len(found) == 12 - 3 + 1
    assert {"os": "macos", "version": 12, "environment": "production"} not in found
    assert found[-1] == {"os": "windows", "version": 16, "environment": "staging"}


def test_include_alone_makes_cells_and_variables():
    matrix = read_matrix({"include": [{"a": 1}, {"a": 2, "b": 3}]})
    assert (matrix.axes, matrix.cells) == (("a", "b"), [{"a": 1}, {"a": 2, "b": 3}])


def test_true_is_not_1():
    assert cells("{lora: [true, 1], include: [{lora: 1, rank: 8}]}") == [
        {"lora": True},
        {"lora": 1, "rank": 8},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]", r"matrix: expected a mapping of variables to lists, got \['a'\]"),
        ("{}", "matrix: there is no cell"),
        ("{a: b}", "matrix.a: expected a list of values, got 'b'"),
        ("{a: []}", r"matrix.a: expected a list of values, got \[\]"),
        ("{a: [1, 2, 1]}", "matrix.a: 1 stands there twice"),
        ("{a b: [1]}", "letters, digits, underscores and hyphens, got 'a b'"),
        ("{a: [1], include: {a: 1}}", "matrix.include: expected a list of mappings"),
        (
            "{size: [1], exclude: [{sise: 1}]}",
            r"matrix.exclude: unknown variable 'sise'; .* Did you mean 'size'\?",
        ),
        ("{size: [1], exclude: [{size: 2}]}", "matrix.exclude: no cell is {size: 2}"),
        ("{size: [1], exclude: [{size: 1}]}", "matrix: there is no cell"),
    ],
)
def test_a_matrix_that_means_nothing_is_refused_in_its_own_words(text, message):
    with pytest.raises(ConfigError, match=message):
        cells(text)


CELL = {"lr": 1e-05, "lora": True, "size": "8b", "groups": ["attn", "mlp"], "n": 3}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("${{ matrix.lora }}", True),
        ("${{matrix.n}}", 3),
        ("${{ matrix.groups }}", ["attn", "mlp"]),
        ("fit-${{ matrix.size }}-lora-${{ matrix.lora }}", "fit-8b-lora-true"),
        ("${{ matrix.size }}${{ matrix.n }}", "8b3"),
        ("lr ${{ matrix.lr }}", "lr 1e-05"),
        ({"a-${{ matrix.n }}": ["${{ matrix.n }}", 7, None]}, {"a-3": [3, 7, None]}),
        ("$100 {{ matrix }} }}", "$100 {{ matrix }} }}"),
    ],
)
def test_an_expression_alone_keeps_its_type_and_in_a_text_becomes_text(template, filled):
    assert fill(template, CELL) == filled


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("${{ matrix.sise }}", r"in the cell {lr: 1e-05, .*}: unknown variable 'sise'"),
        ("${{ env.HOME }}", r"'\${{ env.HOME }}': expected \${{ matrix.NAME }}, got 'env.HOME'"),
        ("a ${{ matrix.n }", r"'a \${{ matrix.n }': '\${{' is not closed by '}}'"),
        ("x-${{ matrix.groups }}", r"can be part of a text, got \['attn', 'mlp'\]"),
    ],
)
def test_an_expression_that_means_nothing_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        fill(template, CELL)


MATRIX = read_matrix({"size": ["s", "m"], "stage": ["bm25", "e5"]})


def test_what_is_the_same_in_several_cells_is_there_once_and_they_share_it():
    found = expand(
        {
            "fit-${{ matrix.size }}": {"model": "${{ matrix.size }}"},
            "test-${{ matrix.size }}-${{ matrix.stage }}": {"run": "${{ matrix.stage }}"},
            "base": {"run": "bm25"},
        },
        MATRIX,
    )
    assert list(found.content) == [
        "fit-s",
        "fit-m",
        "test-s-bm25",
        "test-s-e5",
        "test-m-bm25",
        "test-m-e5",
        "base",
    ]
    assert found.content["fit-m"] == {"model": "m"}
    assert found.cells_of["fit-m"] == [
        {"size": "m", "stage": "bm25"},
        {"size": "m", "stage": "e5"},
    ]
    assert len(found.cells_of["base"]) == 4


def test_one_name_for_two_contents_is_an_error_that_names_both_cells():
    with pytest.raises(ConfigError) as caught:
        expand({"fit-${{ matrix.size }}": {"run": "${{ matrix.stage }}"}}, MATRIX)
    assert str(caught.value) == (
        "job 'fit-s' is not the same in the cells {size: s, stage: bm25} and {size: s, stage: e5}: "
        "a variable that it uses is missing in its name, 'fit-${{ matrix.size }}'"
    )
