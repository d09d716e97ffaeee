"""plugins/README.md: its commands work, and its table is up to date."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from plugins.launch_case import EMPTY_KERNELS
from tide_plugins import cli
from tide_plugins.build import builder
from tide_plugins.cli import app
from tide_plugins.kernels import KERNELS
from tide_runtime.bundle.architectures import ARCHITECTURES
from typer.testing import CliRunner

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
_COMMANDS = re.findall(r"^python -m tide_plugins (build[^#\n]*)", _TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", _COMMANDS)
def test_its_build_commands_work(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against renamed options in the documented commands; uses kernels that compile quickly."""
    monkeypatch.setattr(builder, "sources", lambda: EMPTY_KERNELS)
    monkeypatch.setattr(cli, "KERNELS", KERNELS[:1])
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output


def test_its_table_is_of_every_kernel_and_architecture_and_has_no_spills() -> None:
    """Guards against a stale or manually edited table, which `make kernels` writes."""
    names = re.findall(r"^\| (tide_\w+) \|", _TEXT, re.MULTILINE)
    assert names == [name for kernel in KERNELS for name in kernel.entry_points]
    cubins = [a.name for a in ARCHITECTURES if not a.ptx]
    assert f"| entry point | static shared B | {' | '.join(cubins)} |" in _TEXT
    assert not re.search(r"\d!\d+\+\d+", _TEXT)


def test_its_links_lead_somewhere() -> None:
    assert len(_COMMANDS) >= 3
    links = re.findall(r"\]\(([^)]+)\)", _TEXT)
    assert links and all((_ROOT / "plugins" / link).exists() for link in links)
