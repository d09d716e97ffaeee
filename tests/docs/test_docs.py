"""The documentation builds, its links lead somewhere, and its pictures are those that the script draws."""

import ast
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import typer

from tide_export.sources.gguf.architectures import ARCHITECTURES
from tide_export.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
# Generated page → one text of each part: a command's option, a class's parameter, an error.
REFERENCE = {
    "cli": "tide-export --max-seq-len tide-calibrate --max-disagreement tide-run tide-inspect tide-doctor tide-bench",
    "api": "prefill_chunk max_new_tokens draft_limit tokens_per_second ParamsError force_rebuild max_windows",
    "promises": "Hoeffding",
}


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", DOCS / "draw_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A link or an anchor would lead nowhere, a page be missing from the navigation, or a reference page be empty."""
    # Not --quiet: strict mode would then count no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page, texts in REFERENCE.items():
        html = (tmp_path / "site" / page / "index.html").read_text(encoding="utf-8")
        assert [text for text in texts.split() if text not in html] == [], page


def test_pages_show_the_pictures_that_the_script_draws(pictures: ModuleType, tmp_path: Path) -> None:
    """A page would show an empty frame, or a picture that its script does not draw."""
    shown = {name for page in PAGES for name in re.findall(r"\]\(pictures/(\w+)\.svg\)", page.read_text(encoding="utf-8"))}
    assert shown == set(pictures.PICTURES) == {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    pictures.main(tmp_path)
    for name in shown:
        drawn, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, DOCS / "pictures"))
        words = [re.findall(r"<text[^>]*>([^<]+)", svg) for svg in (drawn, kept)]
        assert words[0] == words[1], f"{name}: python docs/draw_pictures.py"


def test_the_page_on_gguf_files_lists_the_architectures_that_are_read() -> None:
    """Breaks: a reader takes a file whose architecture is refused, or converts one that would be read."""
    section = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("\n## A GGUF file is refused\n\n")[2]
    assert re.findall(r"`([\w-]+)`", section.partition("\n\n")[0]) == list(ARCHITECTURES)
    assert "(docs/troubleshooting.md#a-gguf-file-is-refused)" in (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = [
    pytest.param(kind, text, id=f"{page.stem}-{number}")
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for number, (kind, text) in enumerate(re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]
# Programs of others, whose commands are not tested. tide-lm-eval has the options of lm-evaluation-harness.
NOT_TESTED = {"pip", "python3", "nvidia-smi", "curl", "cp", "systemctl", "serve", "claude", "make", "tide-lm-eval"}


@pytest.mark.parametrize(("kind", "text"), BLOCKS)
def test_a_snippet_is_one_that_tide_takes(kind: str, text: str) -> None:
    """A reader would copy a command that is refused, or code that cannot be imported. (What they do is tested where it lives.)"""
    if kind == "python":
        _check_python(text)
    elif kind == "toml":
        tomllib.loads(text)
    else:
        assert kind in ("bash", "console", "sh", "text"), f"no check of {kind}"
        for line in text.splitlines() if kind != "text" else ():
            _check_command(shlex.split(line.removeprefix("$ "), comments=True))


def _check_command(words: list[str]) -> None:
    words = words[next((n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0) :]
    if words and words[0] == "python":
        script = find_spec(words[2]) if words[1] == "-m" else None
        source = Path(script.origin if script is not None and script.origin else ROOT / words[1])
        texts = [file.read_text() for file in (source.parent.glob("*.py") if source.stem == "__init__" else [source])]
        for option in re.findall(r" --([a-z][a-z-]*)", " ".join(words)):
            assert any(re.search(rf"\b{option.replace('-', '_')}: |--{option}\b", text) for text in texts), words
    elif words and words[0] not in NOT_TESTED:
        command = typer.main.get_command(import_module(SCRIPTS[words[0]].partition(":")[0]).app)
        context = command.make_context(words[0], words[1:])
        if hasattr(command, "resolve_command"):
            name, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            sub.make_context(name, rest, parent=context)


def _check_python(text: str) -> None:
    """It compiles, what it imports exists, and what it imports from TIDE has the arguments that it names."""
    tree, ours = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = import_module(str(node.module))
            names = {alias.name: getattr(module, alias.name) for alias in node.names}
            ours |= names if str(node.module).startswith("tide_") else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            assert {word.arg for word in node.keywords} <= set(inspect.signature(ours[node.func.id]).parameters), ast.unparse(
                node
            )


def test_every_target_says_how_it_was_verified() -> None:
    """A reader would take a target for one that has run, or not find the one that fits the machine."""
    section = (DOCS / "targets.md").read_text(encoding="utf-8").partition("\n## Verified how\n")[2].partition("\n- ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(TARGETS)
