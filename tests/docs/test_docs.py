"""The documentation builds, its links lead somewhere, and its pictures are those that the script draws."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tide_export.quantization.gguf_architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# Generated page → one text of each part: a command's option, a class's parameter, an error.
REFERENCE = {
    "cli": [
        "tide-export",
        "--max-seq-len",
        "tide-calibrate",
        "--max-disagreement",
        "tide-run",
        "tide-inspect",
        "tide-doctor",
        "tide-bench",
    ],
    "api": [
        "prefill_chunk",
        "max_new_tokens",
        "draft_limit",
        "tokens_per_second",
        "ParamsError",
        "force_rebuild",
        "max_windows",
    ],
    "certificate": ["Hoeffding"],
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
        assert [text for text in texts if text not in html] == [], page


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


def test_commands_in_the_pages_have_the_options_they_name() -> None:
    """A reader would copy a command that is refused. (What the commands do is tested where they live.)"""
    known = {
        "tide-bench": (ROOT / "bench/tide_bench/cli.py").read_text(),
        "tide-calibrate": (ROOT / "calibrate/tide_calibrate/cli.py").read_text(),
        "tide-export": (ROOT / "tide_export/cli.py").read_text(),
        "tide-run": (ROOT / "runtime/tide_runtime/cli/run.py").read_text(),
        "serve_fastapi.py": (ROOT / "examples/serve_fastapi.py").read_text(),
    }
    checked = 0
    for page in PAGES:
        for line in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for command in line.splitlines():
                source = next((text for name, text in known.items() if name in command), None)
                for option in re.findall(r" --([a-z][a-z-]*)", command.split("#")[0]) if source else ():
                    assert re.search(rf"\b{option.replace('-', '_')}: |--{option}\b", source or ""), f"{page.name}: {command}"
                    checked += 1
    assert checked > 10
