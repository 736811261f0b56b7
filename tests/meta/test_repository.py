"""Rules about the repository that a machine can check."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")])
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("services/*/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_has_at_most_500_lines(path):
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path):
    targets = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert missing == []


def test_the_shared_namespace_has_no_init_files():
    shared = ["tevatron", "tevatron/eval", "tevatron/utils"]
    roots = [ROOT / "core/src", *ROOT.glob("services/*/src")]
    assert [
        root / name for root in roots for name in shared if (root / name / "__init__.py").exists()
    ] == []


def test_no_script_hides_a_package():
    # Python puts a script's folder first on the path, so that a sibling of it would be imported instead.
    packages = {*sys.stdlib_module_names, "megatron", "tevatron", *packages_distributions()}
    assert packages & {path.stem for path in ROOT.glob("scripts/*.py")} - {"test"} == set()


def test_the_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_benchmark_page_is_what_the_results_give():
    command = [sys.executable, "benchmarks/render.py", "--check"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_make_targets_that_pages_name_exist():
    targets = set(
        re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    )
    named = {
        name for page in PAGES for name in re.findall(r"`make ([a-z][a-z-]*)", page.read_text())
    }
    assert named - targets == set()


@pytest.mark.parametrize(
    "module",
    [
        "tevatron.api.app",
        "tevatron.evaluator.main",
        "tevatron.trainer.main",
        "tevatron.core.cli.main",
    ],
)
def test_a_light_service_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit(1 if {{'torch', 'transformers'}} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_tevatron_distribution_is_refused(tmp_path):
    (tmp_path / "tevatron").mkdir()
    (tmp_path / "tevatron" / "__init__.py").write_text(
        "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tevatron.core"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert "pip uninstall tevatron" in answer.stderr
