"""The command `tevatron.utils.bm25`: a first-stage run of a BEIR folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.errors import ConfigError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.ranklist import write_ranklist
from tevatron.evaluator.bm25 import open_index, search_all
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.files import whole_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.utils.bm25",
        description="Retrieve with BM25 (bm25s, Lucene's formula, k1 .9, b .4, Porter stemmer, Lucene's stop words).",
    )
    parser.add_argument("--dataset", type=Path, required=True, help="BEIR folder")
    parser.add_argument(
        "--output", type=Path, required=True, help="run to write, in TREC's 6 columns"
    )
    parser.add_argument("--depth", type=int, default=100, help="documents a query (default: 100)")
    parser.add_argument(
        "--split",
        default="test",
        help="whose queries: those that this split judges (default: test)",
    )
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder that keeps indexes by the corpus' hash"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.depth < 1:
        raise ConfigError(f"--depth must be 1 or more, got {arguments.depth}")
    folder = BeirFolder(arguments.dataset)
    queries, judged = folder.queries(), folder.qrels(arguments.split)
    lost = sorted(judged.keys() - queries.keys())
    if lost:
        note(f"{len(lost)} judged queries have no text and get no documents, such as {lost[:3]}")
    index = open_index(folder, cache=arguments.cache)
    run = search_all(
        index, {qid: queries[qid] for qid in judged if qid in queries}, depth=arguments.depth
    )
    empty = sorted(qid for qid, documents in run.items() if not documents)
    if empty:
        note(
            f"{len(empty)} queries share no word with the corpus and get no documents, such as {empty[:3]}"
        )
    with whole_file(arguments.output) as path:
        write_ranklist(path, run, trec=True)
    say(
        f"{sum(map(len, run.values()))} documents for {len(run) - len(empty)} queries in {arguments.output}"
    )
