"""Progress of an export: one line per phase with its time, a bar while bytes are written."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ExportProgress:
    """Prints to ``console``; phases and their seconds, summed by name, are kept in ``seconds``."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.seconds: dict[str, float] = {}
        self._interrupted = False

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler. Libraries may swallow the exception it raises; the phase in progress then raises it again."""
        self._interrupted = True
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
        if self._interrupted:
            raise KeyboardInterrupt
        seconds = perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.console.print(f"  [green]✓[/green] {name} [dim]{seconds:.1f} s[/dim]")

    def note(self, text: str) -> None:
        self.console.print(f"    [dim]{text}[/dim]")


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
