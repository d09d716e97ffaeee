"""Tables of the commands, in one look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table


def titled_table(title: str, columns: Iterable[str] = (), right: Iterable[str] = (), header: bool = True) -> Table:
    """A table without rows. ``right``: columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=header)
    numeric = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    return table


def pairs_table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and values, without headings."""
    table = titled_table(title, header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def human_size(count: int) -> str:
    """``count`` bytes as ``12.1 MiB``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
