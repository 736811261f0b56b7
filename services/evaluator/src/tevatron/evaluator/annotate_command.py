"""The command `tevatron.utils.annotate_with_teacher`, with the reference's flags: the teacher is a scorer, or several.

The reference loads the teacher into its own process; here `--backends` says where it is served, or the command starts
the scorer's server for as long as it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.errors import ConfigError
from tevatron.evaluator.annotate import (
    OUTPUT_NAME,
    AnnotateOptions,
    annotate,
    describe_duplicates,
    is_annotated,
    read_source,
)
from tevatron.evaluator.backends import Progress, add_backend_flags, backends_of, pool_options
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.pool import Backend, PoolOptions, learn_served
from tevatron.evaluator.teacher import add_teacher_flags, serving

_WITHOUT_EFFECT = {
    "scratch_dir": "rows go to the output folder as they are scored",
    "keep_scratch": "rows go to the output folder as they are scored",
    "source_dataset_cache_dir": "the file is read where it lies",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.utils.annotate_with_teacher",
        description="Score the passages of a training set with a teacher. Begun again, it goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source_dataset_name", default="json", help="json, or the path of the training file"
    )
    parser.add_argument("--source_dataset_path", type=Path, help="training file (JSON Lines)")
    parser.add_argument("--source_dataset_config", help=argparse.SUPPRESS)
    parser.add_argument("--source_dataset_split", default="train", help=argparse.SUPPRESS)
    parser.add_argument("--output_dir", type=Path, required=True, help=f"gets {OUTPUT_NAME}")
    parser.add_argument(
        "--max_negatives",
        type=int,
        default=15,
        help="of a row; all positives are scored (default: 15)",
    )
    parser.add_argument(
        "--shuffle_negatives", action="store_true", help="draw them in place of taking the first"
    )
    parser.add_argument("--seed", type=int, default=42, help="of the draw (default: 42)")
    parser.add_argument("--limit", type=int, help="rows from the beginning (default: all)")
    parser.add_argument(
        "--chunk_size", type=int, default=1000, help="most pairs in a request (default: 1000)"
    )
    add_backend_flags(parser, required=False)
    add_teacher_flags(parser)
    parser.add_argument("--keep_scratch", action="store_true", help=argparse.SUPPRESS)
    for name in ("scratch_dir", "source_dataset_cache_dir"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(arguments, name):
            note(f"--{name} has no effect: {why}")
    for name, least in (("max_negatives", 0), ("limit", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    pool = pool_options(arguments, chunk_size=arguments.chunk_size)
    options = AnnotateOptions(
        max_negatives=arguments.max_negatives,
        shuffle_negatives=arguments.shuffle_negatives,
        seed=arguments.seed,
        limit=arguments.limit,
    )
    if arguments.backends:
        _annotate(arguments, options, backends_of(arguments.backends), pool)
    else:
        with serving(arguments) as backend:
            _annotate(arguments, options, [backend], pool)


def _annotate(
    arguments: argparse.Namespace,
    options: AnnotateOptions,
    backends: Sequence[Backend],
    pool: PoolOptions,
) -> None:
    source = read_source(_source_path(arguments), options)
    if source.num_duplicate_ids:
        note(describe_duplicates(source))
    if is_annotated(arguments.output_dir, source, options):
        note("all of it was annotated before")
    output = annotate(
        source,
        arguments.output_dir,
        backends,
        served=learn_served(backends, options=pool),
        options=options,
        pool=pool,
        on_progress=Progress(source.num_rows, "rows"),
    )
    say(f"{source.num_rows} rows in {output}")


def _source_path(arguments: argparse.Namespace) -> Path:
    name, path = arguments.source_dataset_name, arguments.source_dataset_path
    if path is not None:
        return Path(path)
    if name == "json":
        raise ConfigError("expected --source_dataset_path FILE, a training file in JSON Lines")
    if not Path(name).is_file():
        raise ConfigError(
            f"--source_dataset_name '{name}' is no file here: data sets of the hub are not fetched; save it as JSON Lines "
            "and give --source_dataset_path"
        )
    return Path(name)
