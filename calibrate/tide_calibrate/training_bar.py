"""A progress bar of training: how much of the planned work is done, and how long the rest takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tide_export.progress import ExportProgress


@contextmanager
def training_bar(progress: ExportProgress, name: str, seconds: float) -> Iterator[Callable[[float], None]]:
    """Show a bar of ``seconds`` of work, over all threads; yields a function that any of them calls with the work it has done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=progress.console, transient=True) as bar:
        task = bar.add_task(name, total=seconds)
        yield lambda done: bar.advance(task, done)
