"""A calibration's outcome on the terminal: agreement by depth, the chosen exits, the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tide_calibrate.calibration_file import CalibrationFile
from tide_calibrate.exit_rows import exit_rows
from tide_calibrate.head_agreement import agreement_rows
from tide_calibrate.verdict import certificate_line, predicted_line, recommendation_line


def print_summary(file: CalibrationFile, console: Console) -> None:
    """Print the tables and sentences of ``file``."""
    own = " (in brackets: on the model's own continuations)" if any(line.continuations for line in file.heads) else ""
    title = f"Agreement with the full model after n of {file.num_layers} layers{own}"
    console.print(_table(title, ["layers", *(line.head for line in file.heads)], agreement_rows(file.heads)))
    rows = exit_rows(file)
    if rows:
        console.print(_table("Chosen exits", list(rows[0]), [list(row.values()) for row in rows]))
    console.print(f"Predicted speedup over the uncut model, one row, greedy: {predicted_line(file.calibration.predicted)}")
    console.print(certificate_line(file))
    console.print(recommendation_line(file))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
