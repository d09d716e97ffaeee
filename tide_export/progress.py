"""Progress of an export: one line per phase with its time, a bar while bytes are written."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Steps:
    """A progress bar that any thread may update."""

    def __init__(self, bar: Progress, task: TaskID, owner: ExportProgress) -> None:
        self._bar = bar
        self._task = task
        self._owner = owner

    @property
    def interrupted(self) -> bool:
        """True once the user has pressed Ctrl-C."""
        return self._owner.interrupted

    def reach(self, step: int, total: int | None = None) -> None:
        """``step`` steps are done, of ``total``; None: of as many as before."""
        self._bar.update(self._task, completed=step, total=total)

    def advance(self, steps: float) -> None:
        self._bar.advance(self._task, steps)


class ExportProgress:
    """Prints to ``console``, its notes unless it is ``brief``. ``seconds``: phase → total time; ``failures``: target → reason."""

    def __init__(self, console: Console | None = None, quiet: bool = False, brief: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self._brief = brief
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.interrupted = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM raise `KeyboardInterrupt`. An error that follows the signal is reported as the interruption.

        Python 3.11 turns an exception inside ``__set_name__`` into a `RuntimeError`, and transformers turns that into a
        `ModuleNotFoundError`; so a signal during an import would otherwise end in a traceback.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)
        try:
            yield
        except Exception as error:
            if self.interrupted:
                raise KeyboardInterrupt from error
            raise

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler. If a library swallows the exception, the phase in progress raises it again."""
        self.interrupted = True
        raise KeyboardInterrupt

    @contextmanager
    def phase(self, name: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show one phase. With ``total_bytes`` the yielded function advances the bar by a number of bytes."""
        columns = [] if total_bytes is None else [BarColumn(), DownloadColumn()]
        start = perf_counter()
        with self._bar("{task.description}", *columns) as bar:
            task = bar.add_task(name, total=total_bytes)
            yield lambda done: bar.advance(task, done)
        if self.interrupted:
            raise KeyboardInterrupt
        self.done(name, perf_counter() - start)

    def done(self, name: str, seconds: float) -> None:
        """Record and print the end of a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.console.print(f"  [green]✓[/green] {name} [dim]{seconds:.1f} s[/dim]")

    def failed(self, target: str, reason: str) -> None:
        """Record and print that a target cannot be built; the export continues with the others."""
        self.failures[target] = reason if target in reason else f"{target}: {reason}"
        self.console.print(f"  [red]✗[/red] {escape(self.failures[target])}", highlight=False)

    @contextmanager
    def steps(self, name: str, total: float | None = None, done: float = 0) -> Iterator[Steps]:
        """Show work that counts its own steps, ``done`` of ``total`` so far; None: `Steps.reach` gets the total."""
        with self._bar("    {task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as bar:
            yield Steps(bar, bar.add_task(name, total=total, completed=done), self)
        if self.interrupted:
            raise KeyboardInterrupt

    def _bar(self, *columns: str | ProgressColumn) -> Progress:
        shown = (SpinnerColumn(), *columns, TimeElapsedColumn())
        return Progress(*shown, console=self.console, transient=True, disable=not self.console.is_terminal)

    def note(self, text: str) -> None:
        if not self._brief:
            self.console.print(f"    [dim]{text}[/dim]")


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
