"""Teacher annotation: what is written, what is refused, and that a kill costs nothing but time."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.support.commands import call
from tests.support.processes import python, running, wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import ConfigError, FormatError, InputError
from tevatron.core.formats.training import read_training
from tevatron.evaluator import annotate_command
from tevatron.evaluator.annotate import AnnotateOptions, annotate, is_annotated, read_source
from tevatron.evaluator.answers import NotFiniteScoreError
from tevatron.evaluator.pool import Backend, PoolOptions, learn_served

QUICK = PoolOptions(first_chunk=4, max_chunk=8, backoff_s=0.01, poll_s=0.02, tries=2)


def row(number, *, positives=1, negatives=2, query_id=None):
    return {
        "query_id": query_id or f"q{number}",
        "query": f"words of query {number}",
        "positive_passages": [
            {"docid": f"p{number}.{i}", "title": f"T{i}", "text": f"passage {i} of query {number}"}
            for i in range(positives)
        ],
        "negative_passages": [
            {"title": "", "text": f"other passage {i} {'x ' * (i % 3)}of {number}"}
            for i in range(negatives)
        ],
    }


def write_rows(path, rows):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


@pytest.fixture
def run(tmp_path, start_scorer):
    """Annotate rows, and return the rows of the output with the scorer that was asked."""

    def run(rows, *, folder="out", scorer=None, **options):
        scorer = scorer or start_scorer()
        options = AnnotateOptions(**options)
        source = read_source(write_rows(tmp_path / "in.jsonl", rows), options)
        backends = [Backend(url=scorer.url)]
        output = annotate(
            source,
            tmp_path / folder,
            backends,
            served=learn_served(backends, options=QUICK),
            options=options,
            pool=QUICK,
        )
        assert is_annotated(tmp_path / folder, source, options)
        return [json.loads(line) for line in output.read_text().splitlines()], scorer

    return run


def overlap_of(scorer, query, passage):
    candidate = Candidate(
        query_id="q", docid="d", query=query, title=passage["title"], text=passage["text"]
    )
    return scorer.scores([candidate.model_dump()])["scores"][0]["score"]


def test_rows_have_the_references_schema_with_all_positives_first(run):
    found, scorer = run([row(0, positives=3, negatives=4), row(1)], max_negatives=2)
    first = found[0]
    assert list(first) == ["query_id", "query", "passages", "scores", "num_positives"]
    assert (first["query_id"], first["query"]) == ("q0", "words of query 0")
    assert [p["text"] for p in first["passages"]] == [
        "passage 0 of query 0",
        "passage 1 of query 0",
        "passage 2 of query 0",
        "other passage 0 of 0",
        "other passage 1 x of 0",
    ]
    assert first["passages"][0] == {"docid": "p0.0", "title": "T0", "text": "passage 0 of query 0"}
    assert first["num_positives"] == 3
    for entry in found:
        assert entry["scores"] == [
            overlap_of(scorer, entry["query"], passage) for passage in entry["passages"]
        ]
    assert scorer.num_pairs == 5 + 3


def test_output_is_training_data_with_every_positive_a_positive(run, tmp_path):
    run([row(0, positives=2, negatives=3)])
    (read,) = read_training(tmp_path / "out" / "annotated.jsonl")
    assert (len(read.positives), len(read.negatives)) == (2, 3)
    assert read.has_teacher_scores
    assert read.positives[1].docid == "p0.1"


def test_rows_of_one_query_id_are_two_rows(run):
    found, _ = run([row(0, query_id="same"), row(1, query_id="same"), row(2)])
    assert [entry["query_id"] for entry in found] == ["same", "same", "q2"]
    assert found[0]["query"] != found[1]["query"]
    assert found[0]["scores"] != found[1]["scores"] or found[0]["passages"] != found[1]["passages"]


def test_duplicate_ids_and_rows_are_counted(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [row(0, query_id="a"), row(1, query_id="a"), row(2)])
    source = read_source(path, AnnotateOptions())
    assert (source.num_rows, source.num_duplicate_ids) == (3, 1)
    assert read_source(path, AnnotateOptions(limit=1)).num_rows == 1


def test_shuffled_negatives_are_drawn_by_the_rows_place_and_the_seed(run):
    rows = [row(n, negatives=9) for n in range(3)]
    options = {"max_negatives": 3, "shuffle_negatives": True}
    texts = [
        [
            [p["text"] for p in entry["passages"]]
            for entry in run(rows, folder=name, **options, seed=seed)[0]
        ]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(set(entry)) == 4 for entry in texts[0])


def test_model_that_gives_no_number_ends_it_and_no_nan_is_written(run, start_scorer, tmp_path):
    scorer = start_scorer()
    problem = {"code": "not_finite", "detail": "query 'q0', document '1#0' scores nan"}
    scorer.answers.append((422, {}, problem))
    with pytest.raises(NotFiniteScoreError, match="scores nan"):
        run([row(n) for n in range(5)], scorer=scorer)
    assert b"NaN" not in (tmp_path / "out" / "annotated.jsonl.part").read_bytes()
    assert len(run([row(n) for n in range(5)])[0]) == 5


def test_broken_file_is_found_before_anything_is_scored(run, start_scorer, tmp_path):
    scorer = start_scorer()
    with pytest.raises(FormatError, match=r"in.jsonl:3: field 'positive_passages'"):
        run([row(0), row(1), row(2) | {"positive_passages": []}], scorer=scorer)
    assert scorer.num_pairs == 0
    with pytest.raises(InputError, match="expected rows to annotate, got none"):
        read_source(write_rows(tmp_path / "in.jsonl", []), AnnotateOptions())


def test_folder_with_other_work_is_refused(run, start_scorer, tmp_path):
    run([row(0)])
    with pytest.raises(ConfigError, match="holds the annotation of other work: source_sha256 is"):
        run([row(1)])
    with pytest.raises(ConfigError, match="other work: max_negatives is 15 there and 1 now"):
        run([row(0)], max_negatives=1)
    other = start_scorer()
    other.info["contract_sha256"] = "d" * 64
    with pytest.raises(ConfigError, match="other work: teacher is"):
        run([row(0)], scorer=other)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no annotation"):
        run([row(0)], folder="full")


def test_finished_work_is_not_done_again(run):
    found, scorer = run([row(0), row(1)])
    asked = scorer.num_pairs
    assert run([row(0), row(1)], scorer=scorer)[0] == found
    assert scorer.num_pairs == asked


def test_torn_line_is_written_again(run, tmp_path, start_scorer):
    rows = [row(n) for n in range(6)]
    whole, _ = run(rows, folder="whole")
    folder = tmp_path / "torn"
    run(rows[:6], folder="torn")
    lines = (folder / "annotated.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "annotated.jsonl").unlink()
    (folder / "annotated.jsonl.part").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    again = start_scorer()
    assert run(rows, folder="torn", scorer=again)[0] == whole
    assert again.num_pairs == 3 * 3


NUM_ROWS = 2000


def command(source, output, *urls):
    return python(
        "-m",
        "tevatron.utils.annotate_with_teacher",
        "--source_dataset_path",
        str(source),
        "--output_dir",
        str(output),
        "--chunk_size",
        "50",
        "--backends",
        *urls,
    )


def test_annotation_killed_twice_equals_the_unbroken_one(tmp_path, start_scorer):
    rows = [row(n, positives=1 + n % 2, negatives=n % 4) for n in range(NUM_ROWS)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    scorers = [start_scorer(), start_scorer()]
    urls = [scorer.url for scorer in scorers]
    subprocess.run(command(source, tmp_path / "unbroken", *urls), check=True)
    unbroken = (tmp_path / "unbroken" / "annotated.jsonl").read_bytes()
    assert len(unbroken.splitlines()) == NUM_ROWS
    num_pairs = sum(scorer.num_pairs for scorer in scorers)
    assert num_pairs == sum(len(json.loads(line)["scores"]) for line in unbroken.splitlines())

    part = tmp_path / "killed" / "annotated.jsonl.part"

    def num_lines():
        return part.read_bytes().count(b"\n") if part.is_file() else 0

    kept = 0
    for until in (NUM_ROWS // 4, NUM_ROWS // 2):
        with running(
            command(source, tmp_path / "killed", *urls), environment=os.environ
        ) as process:
            wait_for(lambda until=until: num_lines() >= until, timeout_s=120, what=f"{until} rows")
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (tmp_path / "killed" / "annotated.jsonl").exists(), (
            "it ended before it was killed"
        )
        kept = num_lines()
    before = sum(scorer.num_pairs for scorer in scorers)
    subprocess.run(command(source, tmp_path / "killed", *urls), check=True)
    assert (tmp_path / "killed" / "annotated.jsonl").read_bytes() == unbroken
    # Whole rows that were there are not scored again.
    left = sum(len(json.loads(line)["scores"]) for line in unbroken.splitlines()[kept:])
    assert sum(scorer.num_pairs for scorer in scorers) - before == left


def test_teacher_is_served_for_as_long_as_the_command_runs(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_folder(tmp_path / "teacher")
    source = write_rows(tmp_path / "in.jsonl", [row(0), row(1)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tevatron.utils.annotate_with_teacher",
            *("--source_dataset_name", "json", "--source_dataset_path", str(source)),
            *("--teacher_model_name_or_path", str(folder), "--prompt_template", "tevatron"),
            *("--teacher_backend", "hf", "--dtype", "float32", "--rerank_max_len", "256"),
            *("--output_dir", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (first, _) = (
        json.loads(line) for line in (tmp_path / "out" / "annotated.jsonl").read_text().splitlines()
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    yes, no = (
        tokenizer(answer, add_special_tokens=False)["input_ids"][0] for answer in (" yes", " no")
    )
    for passage, score in zip(first["passages"], first["scores"], strict=True):
        prompt = (
            f"query: {first['query']} passage: {passage['title']} {passage['text']}\n"
            "Is the passage relevant to the query?"
        )
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1].double()
        assert score == pytest.approx(float(logits[yes] - logits[no]), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected --backends URL"),
        (["--backends", "127.0.0.1:8100"], "expected URLs such as http://127.0.0.1:8100, got"),
        (["--backends", "http://a", "http://a/"], "'http://a' is given twice"),
        (["--backends", "http://a", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--backends", "http://a", "--chunk_size", "20000"], "--chunk_size must be between 1"),
        (
            ["--backends", "http://a", "--source_dataset_name", "rlhn/rlhn-100K"],
            "expected --source_dataset_path|is no file here: data sets of the hub are not fetched",
        ),
    ],
)
def test_flags_that_cannot_be_honoured_say_so(tmp_path, arguments, says):
    words = ["--output_dir", tmp_path / "o", *arguments]
    done = call(annotate_command.main, words, check=2)
    assert any(part in done.stderr for part in says.split("|")), done.stderr
