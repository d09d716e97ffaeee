"""The table of targets that ``tide-export --list-targets`` prints."""

from __future__ import annotations

from rich.table import Table
from tide_runtime.errors import TargetError

from tide_export.targets import TARGETS
from tide_export.targets.base import Target

COLUMNS = ("target", "compute capability", "machines", "backend", "CUDA", "dtypes", "low bits", "built", "attention", "here")


def targets_table() -> Table:
    """One row per target; the last column is yes if this machine can build it."""
    table = Table(title="Targets (--target NAME)", title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column == "target")
    for target in TARGETS.values():
        table.add_row(*target_row(target))
    return table


def target_row(target: Target) -> tuple[str, ...]:
    """The cells of a target's row, in the order of ``COLUMNS``."""
    machine = target.machine
    compute = ", ".join(f"{number / 10:.1f}" for number in machine.compute) or "–"
    dtypes = ", ".join(target.dtypes)
    return (
        target.name,
        compute,
        machine.examples,
        machine.backend,
        machine.cuda or "–",
        dtypes,
        ", ".join(f"int{bits}" for bits in target.low_bits) or "–",
        machine.built,
        machine.attention,
        _buildable_here(target),
    )


def _buildable_here(target: Target) -> str:
    try:
        target.builder.check(target)
    except TargetError:
        return "no"
    return "yes"
