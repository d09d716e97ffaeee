"""docs/gpu.md: its commands are ones that TIDE takes, and say what is missing on a machine without a GPU."""

import re
import shlex
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import typer
from cli_in_process import cli_runner
from tide_runtime.targets.gpu_probe import present_gpu

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), re.S)[1].splitlines()  # type: ignore[index]
COMMANDS = [shlex.split(line, comments=True) for line in LINES]
OURS = [command for command in COMMANDS if command[0].startswith("tide-")]


@pytest.mark.parametrize("command", OURS, ids=lambda command: command[0])
def test_every_command_takes_its_arguments(command: list[str]) -> None:
    """A reader on a rented GPU would pay for minutes of "no such option"."""
    module, _, _ = PROJECT["scripts"][command[0]].partition(":")
    parser = typer.main.get_command(import_module(module).app)
    context = parser.make_context(command[0], list(command[1:]), resilient_parsing=False)
    sub = getattr(parser, "commands", {}).get(context.protected_args[0] if hasattr(context, "protected_args") else "")
    if sub is not None:
        sub.make_context(command[0], [*context.protected_args[1:], *context.args])


@pytest.mark.skipif(present_gpu() is not None, reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["tide-calibrate", "tide-run", "tide-bench", "tide-serve"])
def test_without_a_gpu_commands_say_so(
    name: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would run on the processor without a word, or end with a traceback."""
    command = next(command for command in OURS if command[0] == name)
    assert "cuda" in command
    module, _, function = PROJECT["scripts"][name].partition(":")
    main: Callable[[], None] = getattr(import_module(module), function)
    arguments = [str(bundle) if part == "engine/" else part for part in command[1:]]
    monkeypatch.chdir(tmp_path)
    done = cli_runner(name, main, monkeypatch, capsys, 200)(*arguments)
    assert done.code == 2, done.out + done.err
    wanted = "sees 0 GPUs" if name == "tide-calibrate" else "tide-export"  # the command that adds a target
    assert wanted in done.err and "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
