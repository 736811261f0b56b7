"""The command `tevatron.utils.prepare_training_data`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.formats.beir import BeirFolder
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.prepare import HELDOUT_NAME, TRAINING_NAME, PrepareOptions, prepare

DEFAULTS = PrepareOptions()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.utils.prepare_training_data",
        description="Make training data with BM25 negatives, and a BEIR folder of held-out queries, out of a BEIR folder. "
        "Without judgments of the training split, the test queries that are not held out train.",
    )
    parser.add_argument("--dataset", type=Path, required=True, help="BEIR folder")
    parser.add_argument(
        "--output_dir",
        type=Path,
        required=True,
        help=f"gets {TRAINING_NAME} and the BEIR folder {HELDOUT_NAME}/",
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=None,
        help="test queries to hold out, by the hash of their id (default: all)",
    )
    parser.add_argument(
        "--negatives",
        type=int,
        default=DEFAULTS.num_negatives,
        help="negatives a query (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=DEFAULTS.depth,
        help="BM25 results that they are drawn from (default: %(default)s)",
    )
    parser.add_argument("--train_split", default=DEFAULTS.train_split, help="default: %(default)s")
    parser.add_argument("--test_split", default=DEFAULTS.test_split, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=DEFAULTS.seed, help="of the draw (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder that keeps indexes by the corpus' hash"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    options = PrepareOptions(
        num_queries=arguments.queries,
        num_negatives=arguments.negatives,
        depth=arguments.depth,
        train_split=arguments.train_split,
        test_split=arguments.test_split,
        seed=arguments.seed,
    )
    made = prepare(
        BeirFolder(arguments.dataset), arguments.output_dir, options, cache=arguments.cache
    )
    for remark in made.remarks():
        note(remark)
    say(
        f"{arguments.output_dir / TRAINING_NAME}: {made.num_rows} queries, {made.num_positives} positives, "
        f"{made.num_negatives} negatives\n"
        f"{arguments.output_dir / HELDOUT_NAME}: {made.num_heldout} queries held out"
    )
