"""Error handling of every command: one message on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tide_runtime.errors import TideError

INTERRUPTED = 130  # the exit code that shells report for SIGINT


def run_app(app: typer.Typer, interrupted: str = "interrupted") -> None:
    """Run ``app`` on the process's arguments and exit.

    A `TideError` becomes one message and its exit code (2); Ctrl-C prints ``interrupted`` and exits with 130. Typer
    handles usage errors (2) and a closed pipe (1, no message).
    """
    try:
        app()
    except TideError as error:
        report(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # raised while typer was exiting
        _stderr().print(interrupted)
        sys.exit(INTERRUPTED)
    except SystemExit as end:  # typer turns KeyboardInterrupt into this exit code
        if end.code == INTERRUPTED:
            _stderr().print(interrupted)
        raise


def report(error: TideError) -> None:
    """Print the class and the message of ``error`` on stderr."""
    console = _stderr()
    console.print("error: ", style="red", end="")
    console.print(f"{type(error).__name__}: {error}")


def _stderr() -> Console:
    # Messages quote paths and prompts, in which [brackets] are text instead of rich markup.
    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
