"""Options that a command has from the fields of a dataclass."""

import re
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from tide_runtime.cli.form import APP, with_options
from tide_runtime.errors import ParamsError
from tide_runtime.option import check_choices, option
from typer.testing import CliRunner


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = option((), "Names.", "--name", kind=list[str])
    size: int = option(3, "Size.", min=1)
    quiet: bool = option(False, "Say nothing.", "--quiet")
    form: str = option("round", "Form.", one_of=("round", "square"), command_default="square")
    not_of_the_command: int = 7

    def __post_init__(self) -> None:
        check_choices(self)


@pytest.fixture
def calls() -> list[tuple[str, Settings, int]]:
    return []


@pytest.fixture
def app(calls: list[tuple[str, Settings, int]]) -> typer.Typer:
    made = typer.Typer(**APP)

    @made.command()
    @with_options(count="size")
    def draw(model: str, settings: Settings, *, count: Annotated[int, typer.Option(help="Count.")] = 1) -> None:
        calls.append((model, settings, count))

    return made


def test_the_command_is_called_with_the_dataclass(app: typer.Typer, calls: list[tuple[str, Settings, int]]) -> None:
    """Breaks: an option is read and does nothing, or a default of the command is not the one that its help shows."""
    for arguments in ("m", "m --name a --name b --size 5 --quiet --form round --count 2"):
        assert CliRunner().invoke(app, arguments.split()).exit_code == 0
    assert calls == [("m", Settings(form="square"), 1), ("m", Settings(("a", "b"), 5, True), 2)]


def test_the_help_has_options_in_order(app: typer.Typer) -> None:
    """Breaks: what belongs together stands apart, or a flag has a --no- form that says nothing."""
    shown = CliRunner().invoke(app, ["--help"], env={"TERM": "dumb"}).output
    assert re.findall(r"--\w[\w-]*", shown) == ["--name", "--count", "--size", "--quiet", "--form", "--help"]


@pytest.mark.parametrize(("arguments", "error", "code"), [("--form oval", ParamsError, 1), ("--size 0", SystemExit, 2)])
def test_a_wrong_value_is_refused_before_the_call(
    arguments: str, error: type, code: int, app: typer.Typer, calls: list[tuple[str, Settings, int]]
) -> None:
    done = CliRunner().invoke(app, ["m", *arguments.split()])
    assert (type(done.exception), done.exit_code, calls) == (error, code, [])
