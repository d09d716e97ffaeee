"""An mkdocs hook that adds the page cli.md: each command's arguments and options, as typer documents them.

Commands are declared in Python, so the page is made while the site is built and cannot be out of date.
"""

from __future__ import annotations

import subprocess
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PAGE = "cli.md"
COMMANDS = {
    "tide-export": "tide_export.cli",
    "tide-calibrate": "tide_calibrate.cli",
    "tide-run": "tide_runtime.cli.run",
    "tide-inspect": "tide_runtime.cli.inspect",
    "tide-doctor": "tide_runtime.cli.doctor",
    "tide-serve": "tide_serve.cli",
    "tide-bench": "tide_bench.cli",
}
INTRODUCTION = "# Commands\n\nGenerated from the code. `COMMAND --help` prints the same."


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page to the site's files."""
    sections = (command_reference(name, module) for name, module in COMMANDS.items())
    files.append(File.generated(config, PAGE, content="\n\n".join([INTRODUCTION, *sections])))
    return files


def command_reference(name: str, module: str) -> str:
    """One command's section in Markdown, headings a level lower than typer writes them. Raises PluginError."""
    command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise PluginError(f"typer cannot document {module} ({name}): {done.stderr.strip()}")
    text = done.stdout.strip().replace("][", "]\\[")  # help such as name[:config][:split] is no link
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
