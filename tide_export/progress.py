"""Progress of an export: one line per phase with its time, a bar while bytes are written."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """A bar that moves by steps whose number is known late, and from any thread."""

    def __init__(self, bar: Progress, task: TaskID, owner: ExportProgress) -> None:
        self._bar, self._task, self._owner = bar, task, owner

    @property
    def interrupted(self) -> bool:
        """Whether the user wants the work to end."""
        return self._owner.interrupted

    def begin(self, total: int) -> None:
        self._bar.update(self._task, total=total, completed=0)

    def reach(self, step: int) -> None:
        self._bar.update(self._task, completed=step)


class ExportProgress:
    """Prints to ``console``; keeps phases' seconds, summed by name, in ``seconds``, failed targets in ``failures``."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.interrupted = False

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler. Libraries may swallow the exception it raises; the phase in progress then raises it again."""
        self.interrupted = True
        raise KeyboardInterrupt

    @contextmanager
    def phase(self, name: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
        """One phase; the yielded function takes bytes done when ``total_bytes`` is given."""
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        if total_bytes is not None:
            columns[2:2] = [BarColumn(), DownloadColumn()]
        start = perf_counter()
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(name, total=total_bytes)
            yield lambda done: bar.advance(task, done)
        if self.interrupted:
            raise KeyboardInterrupt
        self.done(name, perf_counter() - start)

    def done(self, name: str, seconds: float) -> None:
        """A phase has ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.console.print(f"  [green]✓[/green] {name} [dim]{seconds:.1f} s[/dim]")

    def failed(self, target: str, reason: str) -> None:
        """A target cannot be built; the others go on."""
        self.failures[target] = reason if target in reason else f"{target}: {reason}"
        self.console.print(f"  [red]✗[/red] {escape(self.failures[target])}", highlight=False)

    @contextmanager
    def steps(self, name: str) -> Iterator[Steps]:
        """Work that counts its own steps, and says how many there are once it knows; not within a phase, which has a bar."""
        columns = [SpinnerColumn(), TextColumn("    {task.description}"), BarColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            yield Steps(bar, bar.add_task(name, total=None), self)
        if self.interrupted:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.console.print(f"    [dim]{text}[/dim]")


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
