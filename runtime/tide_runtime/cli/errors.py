"""Error handling of every command: one message on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from tide_runtime.cli.extras import missing_extra
from tide_runtime.errors import TideError

INTERRUPTED = 130  # the exit code that shells report for SIGINT


def run_app(app: Callable[[], object], interrupted: str = "interrupted", *, command: str = "", extra: str = "") -> None:
    """Run ``app``, usually a `typer.Typer`, on the process's arguments and exit.

    A `TideError` becomes one message and its exit code (2), and so does a missing module that ``extra`` brings; Ctrl-C prints
    ``interrupted`` and exits with 130. Typer handles usage errors (2) and a closed pipe (1, no message).

    Args:
        command: its name, where it needs the ``extra`` of ``tide-llm``.
    """
    try:
        app()
    except TideError as error:
        report(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, command, extra)
        if missing is None:  # a fault of TIDE, or of what it uses
            raise
        report(missing)
        sys.exit(missing.exit_code)
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
