"""How every command of TIDE ends when something goes wrong: one message on stderr and an exit code, no traceback."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tide_runtime.errors import TideError

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def run_app(app: typer.Typer, interrupted: str = "interrupted") -> None:
    """Run ``app`` on the process's arguments and exit.

    A `TideError` becomes one message and its exit code (2), Ctrl-C prints ``interrupted`` and exits with 130. Usage
    errors (2) and a closed pipe (1, no message) are the business of typer.
    """
    try:
        app()
    except TideError as error:
        report(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # one that came while typer was on its way out
        _stderr().print(interrupted)
        sys.exit(INTERRUPTED)
    except SystemExit as end:  # typer turns KeyboardInterrupt into this exit code
        if end.code == INTERRUPTED:
            _stderr().print(interrupted)
        raise


def report(error: TideError) -> None:
    """Print ``error`` on stderr: its class, which names the kind of trouble, and its message word for word."""
    console = _stderr()
    console.print("error: ", style="red", end="")
    console.print(f"{type(error).__name__}: {error}")


def _stderr() -> Console:
    # Messages quote paths and prompts: [brackets] in them are text, not rich's markup, and lines are not cut.
    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
