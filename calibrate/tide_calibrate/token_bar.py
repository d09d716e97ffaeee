"""A progress bar that counts tokens and shows how many go through a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tide_export.progress import ExportProgress


@contextmanager
def token_bar(progress: ExportProgress, name: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar from ``done`` up to ``total`` tokens on the progress' console; the yielded function takes tokens done since."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start, here = perf_counter(), 0
    with Progress(*columns, console=progress.console, transient=True) as bar:
        task = bar.add_task(name, total=total, completed=done, rate=0.0)

        def advance(tokens: int) -> None:
            nonlocal here
            here += tokens
            bar.update(task, advance=tokens, rate=here / (perf_counter() - start))

        yield advance
