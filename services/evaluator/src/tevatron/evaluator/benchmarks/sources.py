"""Where a data set's judgments come from: a folder that holds them in one of the usual forms, else the hub.

Below the folder a data set is looked for as a BEIR folder (`<name>/qrels/<split>.tsv`), and as a TREC file under the
names that Anserini and TREC give it. Counts are checked whatever the source.
"""

from __future__ import annotations

from pathlib import Path

from tevatron.core.errors import InputError
from tevatron.core.formats.files import read_lines
from tevatron.core.formats.qrels import Qrels, read_qrels
from tevatron.core.formats.ranklist import split_columns
from tevatron.evaluator.benchmarks.base import Dataset

_ENDINGS = ("", ".gz", ".zst")
_EXCLUDED = "exclude.{name}.txt"


def places_of(dataset: Dataset) -> list[str]:
    """Return the paths below a folder that may hold the judgments, most usual first."""
    name, split = dataset.name, dataset.split
    return [
        f"{name}/qrels/{split}.tsv",
        f"{name}/qrels/{split}.jsonl",
        *dataset.files,
        f"qrels.{name}.txt",
        f"qrels.{name}.{split}.txt",
    ]


def load_qrels(dataset: Dataset, *, folder: Path, allow_hub: bool = False) -> Qrels:
    """Read a data set's judgments and check their counts.

    Raises:
        InputError: They are nowhere, or are not those of this data set; names the places that were looked at.
    """
    path = _find(folder, places_of(dataset))
    if path is None:
        path = _from_hub(dataset, folder=folder, allow_hub=allow_hub)
    qrels = read_qrels(path)
    dataset.check(qrels, origin=str(path))
    return qrels


def load_excluded(dataset: Dataset, *, folder: Path) -> dict[str, set[str]] | None:
    """Read the documents that do not count for a query (`query_id docid` a line); none where there is no such file."""
    path = _find(folder, [_EXCLUDED.format(name=dataset.name)])
    if path is None:
        return None
    excluded: dict[str, set[str]] = {}
    for number, text in read_lines(path):
        columns = split_columns(text)
        if len(columns) != 2:
            raise InputError(
                f"{path}:{number}: expected query_id docid, got {len(columns)} columns"
            )
        excluded.setdefault(columns[0], set()).add(columns[1])
    return excluded


def _find(folder: Path, places: list[str]) -> Path | None:
    for place in places:
        for ending in _ENDINGS:
            if (found := folder / f"{place}{ending}").is_file():
                return found
    return None


def _from_hub(dataset: Dataset, *, folder: Path, allow_hub: bool) -> Path:
    looked = f"{folder} has none of {', '.join(places_of(dataset))} (or .gz, .zst)"
    if dataset.hub_id is None:
        raise InputError(
            f"no judgments of {dataset.name}: {looked}, and the hub has none in these forms"
        )
    if not allow_hub:
        raise InputError(
            f"no judgments of {dataset.name}: {looked}, and the hub is not allowed here (TEVATRON_ALLOW_HUB=true)"
        )
    # Heavy, and of no use where the judgments are files.
    from huggingface_hub import hf_hub_download, list_repo_files

    wanted = [f"qrels/{dataset.split}.tsv", f"qrels/{dataset.split}.jsonl", f"{dataset.split}.tsv"]
    try:
        names = set(list_repo_files(dataset.hub_id, repo_type="dataset"))
        name = next((name for name in wanted if name in names), None)
        if name is None:
            raise InputError(
                f"no judgments of {dataset.name}: {dataset.hub_id} has none of {', '.join(wanted)}"
            )
        return Path(hf_hub_download(dataset.hub_id, name, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"no judgments of {dataset.name}: {looked}, and {dataset.hub_id} cannot be fetched from the hub: {error}"
        ) from error
