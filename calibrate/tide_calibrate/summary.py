"""What a placement is predicted to gain, for a terminal: a table and one plain sentence."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from tide_runtime.calibration import ExitInfo

from tide_calibrate.placement import GATE, Placement
from tide_calibrate.simulate import PolicySimulation


def summary(placement: Placement) -> RenderableType:
    """The chosen exits, the prediction per policy, and the recommendation."""
    if not placement.exits:
        return Group(recommendation(placement))
    return Group(_exit_table(placement), _policy_table(placement), recommendation(placement))


def recommendation(placement: Placement) -> str:
    """One sentence for a person who decides whether to use the exits."""
    if not placement.exits:
        return (
            f"Use policy full: the model does not agree with itself early enough, so that even a router that is always right "
            f"would gain less than {GATE - 1:.0%}."
        )
    exact = placement.simulations["exact"]
    if placement.recommended == "full":
        return (
            f"Use policy full: exact is predicted to run at {exact.speedup:.2f}x the uncut model's speed on this machine, "
            f"and below {GATE:.2f}x it is not worth having."
        )
    return (
        f"Use policy exact: {exact.speedup:.2f}x the uncut model's tokens/s predicted on this machine, one row, greedy, with "
        f"output identical to full ({exact.tokens_per_cycle:.1f} tokens for each run of the last layers)."
    )


def _exit_table(placement: Placement) -> Table:
    table = Table("after layer", "head", "router", "exact: score ≥", "exit: score ≥", title="exits", title_justify="left")
    for exit in placement.exits:
        thresholds = _score(exit.exact_threshold), _score(exit.exit_threshold)
        table.add_row(f"{exit.checkpoint} of {placement.num_layers}", exit.head, _router(exit), *thresholds)
    return table


def _policy_table(placement: Placement) -> Table:
    columns = ("policy", "speedup", "ms per token", "layers per token", "tokens per cycle", "right early", "differs from full")
    table = Table(*columns, title=f"predicted, one row, greedy, draft limit {placement.draft_limit}", title_justify="left")
    for name, simulation in placement.simulations.items():
        table.add_row(name, *_figures(simulation))
    return table


def _figures(simulation: PolicySimulation) -> tuple[str, ...]:
    early = "–" if simulation.acceptance is None else f"{simulation.acceptance:.1%}"
    return (
        f"{simulation.speedup:.2f}x",
        f"{simulation.ms_per_token:.3f}",
        f"{simulation.layers_per_token:.1f}",
        f"{simulation.tokens_per_cycle:.2f}",
        early,
        f"{simulation.disagreement:.2%}",
    )


def _router(exit: ExitInfo) -> str:
    return exit.router if exit.mlp_threshold is None else f"{exit.router} (mlp ≥ {exit.mlp_threshold:.3f})"


def _score(threshold: float | None) -> str:
    return "not certified" if threshold is None else f"{threshold:.3f}"
