"""The README's commands do what a newcomer expects of them: they run as printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("<!-- tested", 1)[1].split("\n## ", 1)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone-like folder, so that engine/ does not land in the working tree."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.slow
def test_commands_and_snippet_run(folder):
    """The first thing a user types would fail."""
    commands = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.S) for line in block.splitlines()]
    assert [c.split()[0] for c in commands] == ["tide-export", "tide-inspect", "tide-run", "tide-run"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip() or command.startswith("tide-export")
    (snippet,) = re.findall(r"```python\n(.*?)```", SECTION, re.S)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout


def test_make_targets_are_in_the_makefile():
    """A reader would type `make demo` or `make test` and get an error."""
    makefile = (ROOT / "Makefile").read_text()
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`|\$ )make ([\w-]+)", pages, re.M))
    assert {"demo", "test", "lint", "tables", "docs"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert shutil.which("make")


@pytest.mark.parametrize(
    "path",
    [*(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "plugins/README.md", "CHANGELOG.md")), *ROOT.glob("docs/*.md")],
    ids=lambda path: path.name,
)
def test_links_lead_to_files(path):
    """A reader would click on a file that has moved. (Anchors in docs/ are checked where the site is built.)"""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_readme_is_short():
    """A newcomer would look for install and limits among tables; tables belong in docs/."""
    assert len(README.splitlines()) <= 130


def test_results_hold_the_newest_run_of_each_kind():
    """A reader would take an outdated run for a current one."""
    kinds = [path.name[11:] for path in (ROOT / "docs" / "results").glob("*.json")]
    assert len(kinds) == len(set(kinds)), sorted(kind for kind in set(kinds) if kinds.count(kind) > 1)


def test_tables_are_up_to_date():
    """A number in the README would not be the one that its script measured."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
