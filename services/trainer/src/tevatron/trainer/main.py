"""`tevatron-trainer worker`: the process that takes train and export jobs; `tevatron-trainer sbatch`: Slurm without it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.errors import TevatronError
from tevatron.core.settings import Settings
from tevatron.core.worker.main import serve
from tevatron.core.worker.runner import Handler
from tevatron.trainer.launchers import make_chooser, slurm
from tevatron.trainer.launchers.cluster import count_nodes
from tevatron.trainer.tasks import Tasks

SERVICE = "trainer"


def make_handlers(settings: Settings) -> dict[JobKind, Handler]:
    """Return what this worker does for each kind of job."""
    choose = make_chooser(settings)
    choose(None)  # What the deployment's own launcher lacks is said now.
    tasks = Tasks(choose)
    return {JobKind.TRAIN: tasks.train, JobKind.EXPORT: tasks.export}


def sbatch_command(options: argparse.Namespace, settings: Settings) -> int:
    """Print the batch file that runs a driver on Slurm, or submit it and print the job's id."""
    num_nodes = count_nodes(
        num_processes=options.num_processes,
        num_nodes=options.num_nodes,
        gpus_per_node=settings.slurm_gpus_per_node,
    )
    ranks_per_node = options.num_processes // num_nodes
    environment = "megatron" if options.module.startswith("tevatron.megatron.") else "hf"
    command = slurm.node_command(
        settings,
        python=slurm.node_python(settings, environment),
        ranks_per_node=ranks_per_node,
    )
    batch = slurm.Batch(
        name=options.name,
        command=[*command, options.module, *options.arguments],
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        output=f"{options.name}-%j.log",
        variables={},
    )
    text = slurm.batch_file(settings, batch)
    sys.stdout.write(text if options.dry_run else f"{slurm.sbatch(text, folder=Path.cwd())}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tevatron-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("worker", help="take train and export jobs until SIGTERM")
    batch = commands.add_parser(
        "sbatch",
        help="run a driver on Slurm without the platform",
        description="Partition, GPUs of a node and so on are TEVATRON_SLURM_*; the log lies in this folder.",
    )
    batch.add_argument("--num_processes", type=int, default=1, help="ranks on all nodes together")
    batch.add_argument("--num_nodes", type=int)
    batch.add_argument("--name", default="tevatron")
    batch.add_argument("--dry_run", action="store_true", help="print the batch file only")
    batch.add_argument("module", help="such as tevatron.megatron.driver.train")
    batch.add_argument("arguments", nargs=argparse.REMAINDER, help="the driver's own")
    options = parser.parse_args(argv)
    settings = Settings.from_environment()
    if options.command == "worker":
        return serve(SERVICE, make_handlers(settings), settings)
    try:
        return sbatch_command(options, settings)
    except TevatronError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
