"""Progress bars: of training by the planned work that is done, and of a pass over text by its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

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


@contextmanager
def token_bar(progress: ExportProgress, name: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar from ``done`` to ``total`` tokens; yields a function that advances it by a number of tokens."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start = perf_counter()
    advanced = 0
    with Progress(*columns, console=progress.console, transient=True) as bar:
        task = bar.add_task(name, total=total, completed=done, rate=0.0)

        def advance(tokens: int) -> None:
            nonlocal advanced
            advanced += tokens
            bar.update(task, advance=tokens, rate=advanced / (perf_counter() - start))

        yield advance
