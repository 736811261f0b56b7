import json

import pytest

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.qrels import read_qrels
from tevatron.evaluator import benchmarks
from tevatron.evaluator.benchmarks import (
    BENCHMARKS,
    Benchmark,
    Dataset,
    Unit,
    folder_benchmark,
    get_benchmark,
    load_excluded,
    load_qrels,
    prepare_run,
)
from tevatron.evaluator.metrics_command import main

FORUMS = {
    "android": 0.50376,
    "english": 0.41939,
    "gaming": 0.55742,
    "gis": 0.34968,
    "mathematica": 0.27993,
    "physics": 0.41109,
    "programmers": 0.37474,
    "stats": 0.32599,
    "tex": 0.26572,
    "unix": 0.36904,
    "webmasters": 0.37906,
    "wordpress": 0.30864,
}
E5 = {  # nDCG@10 of intfloat/e5-base-v2, results of MTEB (CC0)
    "arguana": 0.44568,
    "climate-fever": 0.2656,
    "dbpedia-entity": 0.42226,
    "fever": 0.84987,
    "fiqa": 0.39883,
    "hotpotqa": 0.6915,
    "nfcorpus": 0.35389,
    "nq": 0.58221,
    "quora": 0.86555,
    "scidocs": 0.18681,
    "scifact": 0.71944,
    "trec-covid": 0.69633,
    "webis-touche2020": 0.26402,
    "msmarco": 0.41765,
} | {f"cqadupstack-{forum}": value for forum, value in FORUMS.items()}


def test_beir15_averages_cqadupstack_as_one_unit():
    average = get_benchmark("beir15").average(E5)
    assert len(E5) == 26
    assert len(average.rows) == 15
    assert round(average.value, 4) == 0.5026  # .4502 where all 26 count the same
    assert average.missing == ()
    assert average.rows[-1].label == "cqadupstack"
    assert average.rows[-1].value == pytest.approx(sum(FORUMS.values()) / 12)


def test_a_stored_sub_average_that_is_not_the_mean_of_its_parts_is_reported():
    (found,) = get_benchmark("beir15").disagreements(E5, {"cqadupstack": 0.385436})
    assert str(found) == (
        "cqadupstack: the stored value 0.38544 is not the mean of its parts, 0.37871 (+0.00673)"
    )
    assert get_benchmark("beir15").disagreements(E5, {"cqadupstack": 0.37871}) == []
    without_tex = {name: value for name, value in E5.items() if name != "cqadupstack-tex"}
    assert get_benchmark("beir15").disagreements(without_tex, {"cqadupstack": 0.5}) == []


def test_what_is_missing_is_told():
    values = {"scifact": 0.5, "cqadupstack-tex": 0.2, "cqadupstack-unix": 0.4}
    average = get_benchmark("beir15").average(values)
    assert average.value == pytest.approx(0.4)
    assert len(average.missing) == 23
    rows = {row.label: row for row in average.rows}
    assert rows["cqadupstack"].value == pytest.approx(0.3)
    assert "cqadupstack-android" in rows["cqadupstack"].missing
    assert (rows["nq"].value, rows["nq"].missing) == (None, ("nq",))
    assert get_benchmark("beir15").average({}).value is None


def test_unknown_names_are_errors_that_list_what_there_is():
    with pytest.raises(ConfigError, match=r"unknown benchmark 'bier15'; .*Did you mean 'beir15'"):
        get_benchmark("bier15")
    with pytest.raises(ConfigError, match="unknown data set of beir15 'cqadupstack'"):
        get_benchmark("beir15").dataset("cqadupstack")
    with pytest.raises(ConfigError, match="unknown data set of dl19 'dl20'"):
        get_benchmark("dl19").average({"dl20": 0.5})


def test_units_must_hold_every_data_set_once():
    with pytest.raises(ConfigError, match="every data set must stand in exactly one unit"):
        Benchmark(
            name="x",
            title="X",
            datasets=(Dataset(name="a"), Dataset(name="b")),
            units=(Unit("a", ("a",)),),
        )


def test_the_registry_has_each_benchmark_under_its_name():
    assert sorted(BENCHMARKS) == [
        "beir15",
        "bright",
        "dl19",
        "dl20",
        "mteb-reranking",
        "mteb-retrieval",
    ]
    assert {name: len(entry.units) for name, entry in BENCHMARKS.items()} == {
        "beir15": 15,
        "bright": 12,
        "dl19": 1,
        "dl20": 1,
        "mteb-reranking": 3,
        "mteb-retrieval": 10,
    }
    dropping = [
        d.name for entry in BENCHMARKS.values() for d in entry.datasets if d.drops_identical
    ]
    assert sorted(set(dropping)) == ["arguana", "quora"]
    assert get_benchmark("beir15").dataset("msmarco").split == "dev"


def test_counts_of_all_26_sets_are_those_of_the_manifest(shared_data):
    manifest = json.loads((shared_data / "beir15" / "manifest.json").read_text())
    assert {entry["dataset"] for entry in manifest} == set(get_benchmark("beir15").names())
    for entry in manifest:
        dataset = get_benchmark("beir15").dataset(entry["dataset"])
        qrels = load_qrels(dataset, folder=shared_data / "beir15")
        grades = [grade for judged in qrels.values() for grade in judged.values()]
        assert len(qrels) == dataset.num_queries == entry["queries_judged"]
        assert len(grades) == entry["qrel_lines"]
        levels = {int(level): number for level, number in entry["rel_levels"].items()}
        assert {level: grades.count(level) for level in set(grades)} == levels
        assert dataset.num_relevant == sum(n for level, n in levels.items() if level > 0)


def test_dl19_loads_with_its_counts(shared_data):
    qrels = load_qrels(get_benchmark("dl19").dataset("dl19"), folder=shared_data / "qrels")
    assert (len(qrels), sum(map(len, qrels.values()))) == (43, 9260)


def _folder(path, qrels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(qrels)


def test_another_split_or_version_is_refused(tmp_path, shared_data):
    dl19 = (shared_data / "qrels" / "qrels.dl19-passage.txt").read_text()
    _folder(tmp_path / "msmarco" / "qrels" / "dev.tsv", dl19)
    with pytest.raises(InputError, match=r"msmarco \(dev\): expected 6980 judged queries, got 43"):
        load_qrels(get_benchmark("beir15").dataset("msmarco"), folder=tmp_path)
    touche = read_qrels(shared_data / "beir15" / "qrels.webis-touche2020.txt.gz")
    first = next(iter(touche))
    lines = [f"{q} 0 {d} {g}" for q, grades in touche.items() for d, g in grades.items()]
    _folder(tmp_path / "qrels.webis-touche2020.txt", "\n".join([*lines, f"{first} 0 new 1"]))
    with pytest.raises(InputError, match="expected 932 relevant judgments, got 933"):
        load_qrels(get_benchmark("beir15").dataset("webis-touche2020"), folder=tmp_path)


def test_judgments_are_found_in_the_layouts_that_people_have(tmp_path):
    tex = Dataset(name="cqadupstack-tex", files=("cqadupstack/tex/qrels/test.tsv",))
    text = "query-id\tcorpus-id\tscore\nq\td\t1\n"
    for place in (
        "a/cqadupstack-tex/qrels/test.tsv",
        "b/cqadupstack/tex/qrels/test.tsv",
        "c/qrels.cqadupstack-tex.txt",
        "d/qrels.cqadupstack-tex.test.txt",
    ):
        _folder(tmp_path / place, text)
        assert load_qrels(tex, folder=tmp_path / place[0]) == {"q": {"d": 1}}
    _folder(
        tmp_path / "e/cqadupstack-tex/qrels/test.jsonl",
        '{"query-id":"q","corpus-id":"d","score":1}',
    )
    assert load_qrels(tex, folder=tmp_path / "e") == {"q": {"d": 1}}


def test_judgments_that_are_nowhere_name_the_places(tmp_path):
    scifact = get_benchmark("beir15").dataset("scifact")
    with pytest.raises(
        InputError,
        match=r"no judgments of scifact: .* has none of scifact/qrels/test.tsv, .*the hub is not allowed here",
    ):
        load_qrels(scifact, folder=tmp_path)
    with pytest.raises(InputError, match="the hub has none in these forms"):
        load_qrels(get_benchmark("bright").dataset("bright-pony"), folder=tmp_path, allow_hub=True)


class Hub:
    """What stands in for the hub, which cannot be reached from here."""

    def __init__(self, files):
        self.files = files
        self.asked = []

    def list_repo_files(self, repo_id, *, repo_type):
        self.asked.append((repo_id, repo_type))
        return list(self.files)

    def hf_hub_download(self, repo_id, filename, *, repo_type):
        self.asked.append((repo_id, filename, repo_type))
        return str(self.files[filename])


def test_judgments_come_from_the_hub_where_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "hub.jsonl").write_text('{"query-id": "q", "corpus-id": "d", "score": 1.0}\n')
    hub = Hub({"README.md": "", "qrels/test.jsonl": tmp_path / "hub.jsonl"})
    monkeypatch.setattr("huggingface_hub.list_repo_files", hub.list_repo_files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.hf_hub_download)
    dataset = Dataset(name="x", num_queries=1, hub_id="owner/x")
    assert load_qrels(dataset, folder=tmp_path, allow_hub=True) == {"q": {"d": 1}}
    assert hub.asked == [("owner/x", "dataset"), ("owner/x", "qrels/test.jsonl", "dataset")]
    del hub.files["qrels/test.jsonl"]
    with pytest.raises(InputError, match=r"owner/x has none of qrels/test\.tsv, qrels/test\.jsonl"):
        load_qrels(dataset, folder=tmp_path, allow_hub=True)


def test_a_hub_that_does_not_answer_is_named(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    with pytest.raises(InputError, match=r"owner/x cannot be fetched from the hub: no route"):
        load_qrels(Dataset(name="x", hub_id="owner/x"), folder=tmp_path, allow_hub=True)


def test_self_retrieved_ids_go_where_the_entry_says_so():
    run = {"q1": {"q1": 2.0, "d": 1.0}}
    assert prepare_run(get_benchmark("beir15").dataset("quora"), run) == ({"q1": {"d": 1.0}}, 1)
    assert prepare_run(get_benchmark("beir15").dataset("scifact"), run) == (run, 0)
    assert run == {"q1": {"q1": 2.0, "d": 1.0}}


def test_excluded_documents_go_where_the_entry_says_so(tmp_path):
    (tmp_path / "exclude.bright-leetcode.txt").write_text("0 a.txt\n0 b.txt\n1 c.txt\n")
    leetcode = get_benchmark("bright").dataset("bright-leetcode")
    excluded = load_excluded(leetcode, folder=tmp_path)
    run = {"0": {"a.txt": 3.0, "c.txt": 2.0}, "2": {"a.txt": 1.0}}
    kept = {"0": {"c.txt": 2.0}, "2": {"a.txt": 1.0}}
    assert prepare_run(leetcode, run, excluded=excluded) == (kept, 1)
    biology = get_benchmark("bright").dataset("bright-biology")
    assert prepare_run(biology, run, excluded=excluded) == (run, 0)
    assert load_excluded(biology, folder=tmp_path) is None
    (tmp_path / "exclude.bright-aops.txt").write_text("0 a b\n")
    with pytest.raises(InputError, match=r"aops.txt:1: expected query_id docid, got 3 columns"):
        load_excluded(get_benchmark("bright").dataset("bright-aops"), folder=tmp_path)


def test_a_beir_folder_is_a_benchmark(tmp_path):
    _folder(tmp_path / "mine" / "qrels" / "dev.tsv", "q\td\t1\n")
    mine = folder_benchmark(tmp_path / "mine", split="dev")
    assert mine.names() == ("mine",)
    assert load_qrels(mine.dataset("mine"), folder=tmp_path) == {"q": {"d": 1}}


PRIVATE = Benchmark(
    name="private",
    title="Ours",
    datasets=(
        Dataset(name="tickets", num_queries=2, drops_identical=True, relevance_level=2),
        Dataset(name="wiki-en"),
        Dataset(name="wiki-de"),
    ),
    units=(Unit("tickets", ("tickets",)), Unit("wiki", ("wiki-en", "wiki-de"))),
    columns=("mrr@10",),
)


def test_a_private_benchmark_is_one_entry(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmarks.BENCHMARKS, "private", PRIVATE)
    (tmp_path / "qrels.tickets.txt").write_text("q1 0 a 2\nq1 0 b 1\nq2 0 c 2\n")
    (tmp_path / "run").write_text("q1 q1 9\nq1 b 8\nq1 a 7\nq2 c 1\n")
    arguments = ["--benchmark", "private", "--dataset", "tickets", "--ranklist", tmp_path / "run"]
    arguments += ["--beir_cache_dir", tmp_path, "--output", tmp_path / "m.json"]
    assert main([str(argument) for argument in arguments]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert (found["benchmark"], found["dataset"], found["n_removed"]) == ("private", "tickets", 1)
    assert found["mrr"]["MRR@10"] == 0.75  # a at rank 2, since b is below grade 2
    assert "1 documents that must not count for their query were removed" in capsys.readouterr().err
    average = get_benchmark("private").average({"tickets": 0.6, "wiki-en": 0.2, "wiki-de": 0.4})
    assert average.value == pytest.approx(0.45)
