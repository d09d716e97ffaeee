"""Tables of a report: cells are made once, and the terminal, Markdown and HTML show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_MIN_WIDTH = 170  # piped output would wrap the tables at 80


@dataclass(frozen=True)
class Table:
    """A table, or a statement where there are no headings.

    Args:
        title: what was measured; date and machine are added where it is published.
        caption: how to read the cells, or the statement.
        notes: sentences that belong to some of the rows.
        faint: rows whose figures must not be compared with the others', by their number.
    """

    title: str
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    caption: str = ""
    notes: Sequence[str] = ()
    faint: Sequence[int] = ()

    def markdown(self, where: str | None) -> str:
        """``where``: date and machine; None for a table that follows another one of its run."""
        measured = f" ({where})" if where is not None else ""
        lines = [f"**{self.title}**{measured}{f': {self.caption}' if self.caption else '.'}"]
        if self.headings:
            lines += ["", *markdown_table(self.headings, self.rows)]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)])

    def print(self, console: Console) -> None:
        """Columns of numbers are aligned at their ends."""
        from rich import table  # scripts that run where only the runtime is installed print nothing

        if not self.headings:
            console.print(f"{self.title}: {self.caption}", markup=False, highlight=False)
            return
        shown = table.Table(title=self.title, caption=self.caption or None)
        for number, heading in enumerate(self.headings):
            words = any(row[number][:1].isalpha() for row in self.rows)
            shown.add_column(heading, justify="left" if words else "right")
        for number, row in enumerate(self.rows):
            shown.add_row(*row, style="dim" if number in self.faint else None)
        console.print(shown, markup=False)
        for note in self.notes:
            console.print(note, style="yellow", markup=False)


@cache
def console() -> Console:
    """The terminal of all benchmarks of this process."""
    from rich.console import Console

    return Console(width=max(_MIN_WIDTH, Console().width))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [_line(headings), "|---" * len(headings) + "|", *map(_line, rows)]


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def where(run: Mapping[str, Any]) -> str:
    """Date and machine of a run, as its JSON file has them."""
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("onnxruntime", "torch"))
    instructions = f", {machine['instructions']}" if "instructions" in machine else ""  # runs before 2026-11-27 did not note them
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return f"{run['date'][:10]}, {machine['cpu']}{instructions}, {machine['cores']} cores{gpu}, {versions}"
