"""The command `tevatron.utils.mine_hard_negatives`: training data out of a BEIR folder and a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.candidates import read_run
from tevatron.core.formats.training import TrainingRow, read_training
from tevatron.evaluator.annotate import AnnotateOptions, annotate, read_source
from tevatron.evaluator.backends import Progress, add_backend_flags, backends_of, pool_options
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.mining import Mined, MineOptions, candidate_rows, mine, write_rows
from tevatron.evaluator.pool import learn_served

DEFAULTS = MineOptions()
TRAINING_NAME = "train.jsonl"
CANDIDATES_NAME = "candidates.jsonl"
TEACHER_NAME = "teacher"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.utils.mine_hard_negatives",
        description="Make training data with hard negatives out of a BEIR folder and a run of its queries.",
        allow_abbrev=False,
    )
    parser.add_argument("--dataset", type=Path, required=True, help="BEIR folder")
    parser.add_argument("--split", default=DEFAULTS.split, help="default: %(default)s")
    parser.add_argument("--ranklist", type=Path, required=True, help="run with the split's queries")
    parser.add_argument("--output_dir", type=Path, required=True, help=f"gets {TRAINING_NAME}")
    parser.add_argument(
        "--negatives",
        type=int,
        default=DEFAULTS.num_negatives,
        help="negatives a query, the hardest first (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=DEFAULTS.depth,
        help="candidates a query, from the top of the run (default: %(default)s)",
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=DEFAULTS.skip,
        help="candidates at the very top to leave alone (default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=DEFAULTS.margin,
        help="how far below the lowest-scored positive a negative must score (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk_size", type=int, default=1000, help="most pairs in a request (default: 1000)"
    )
    add_backend_flags(parser, required=False)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    options = MineOptions(
        split=arguments.split,
        depth=arguments.depth,
        skip=arguments.skip,
        num_negatives=arguments.negatives,
        margin=arguments.margin,
    )
    report = Mined()
    rows = candidate_rows(
        BeirFolder(arguments.dataset), read_run(arguments.ranklist), options, report
    )
    if arguments.backends:
        rows = _taught(arguments, rows)
    output = arguments.output_dir / TRAINING_NAME
    write_rows(output, mine(rows, options, report))
    for remark in report.remarks():
        note(remark)
    say(
        f"{output}: {report.num_rows} queries, {report.num_positives} positives, {report.num_negatives} negatives; "
        f"{report.num_too_good} candidates dropped as likely relevant"
    )


def _taught(arguments: argparse.Namespace, rows: Iterator[TrainingRow]) -> Iterator[TrainingRow]:
    """Return the rows with a teacher's scores in place of the run's; begun again, it goes on where it was."""
    candidates = arguments.output_dir / CANDIDATES_NAME
    write_rows(candidates, rows)
    everything = AnnotateOptions(max_negatives=arguments.depth)
    source = read_source(candidates, everything)
    backends = backends_of(arguments.backends)
    pool = pool_options(arguments, chunk_size=arguments.chunk_size)
    return read_training(
        annotate(
            source,
            arguments.output_dir / TEACHER_NAME,
            backends,
            served=learn_served(backends, options=pool),
            options=everything,
            pool=pool,
            on_progress=Progress(source.num_rows, "rows"),
        )
    )
