"""Inference cost–performance curve: layers per token against agreement and perplexity, swept over the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, ScalarFormatter
from tide_runtime.calibration import ExitInfo

from tide_calibrate.report.canvas import COLOURS, INK, MUTED, legend_below, panels
from tide_calibrate.report.stops import Stops, layers_in_head, stops, threshold_of
from tide_calibrate.traces import SplitTrace

SWEEP_POINTS = 49


@dataclass(frozen=True)
class OperatingPoint:
    """One way to run the model on the test text.

    Args:
        name: what it is: a threshold, a static skip, the full model.
        layers: mean layers run per token.
        agreement: share of tokens whose likeliest next token is the full model's.
        perplexity: of the test text (exp of the mean nats per token).
    """

    name: str
    layers: float
    agreement: float
    perplexity: float


@dataclass(frozen=True)
class CostCurve:
    """The sweep over a threshold that all exits share, the chosen thresholds, and the baselines.

    Args:
        sweep: layers per token falling with the threshold; empty when there are no exits.
        chosen: the certified thresholds of policy ``exit``; None when there are none.
        static: for each candidate, every token skipping from there to the head that agrees most.
        full: the model itself.
    """

    sweep: list[OperatingPoint]
    chosen: OperatingPoint | None
    static: list[OperatingPoint]
    full: OperatingPoint


def cost_curve(trace: SplitTrace, exits: Sequence[ExitInfo]) -> CostCurve:
    """Run policy ``exit`` with ``exits`` over the tokens of ``trace`` at many thresholds."""
    sweep = [
        _point(f"threshold {t:.4g}", trace, exits, stops(trace, exits, [t] * len(exits))) for t in _thresholds(trace, exits)
    ]
    chosen = None
    if any(info.exit_threshold is not None for info in exits):
        certified = stops(trace, exits, [threshold_of(info, "exit") for info in exits])
        chosen = _point("certified thresholds", trace, exits, certified)
    full = OperatingPoint("full", float(trace.num_layers), 1.0, _perplexity(trace.full_nll))
    return CostCurve(sweep, chosen, _static_skips(trace), full)


def _thresholds(trace: SplitTrace, exits: Sequence[ExitInfo]) -> list[float]:
    if not exits:
        return []
    names = ["max_probability" if info.router == "mlp+max_probability" else info.router for info in exits]
    scores = [trace.exits[info.checkpoint, info.head].scores[name] for info, name in zip(exits, names, strict=True)]
    # Scores crowd near 1: quantiles that do the same give an even line.
    levels = 1 - np.linspace(0, 1, SWEEP_POINTS) ** 2
    return sorted({float(t) for t in np.quantile(np.concatenate(scores), levels)})


def _point(name: str, trace: SplitTrace, exits: Sequence[ExitInfo], taken: Stops) -> OperatingPoint:
    agrees, nll = np.ones(taken.exit.size, np.bool_), trace.full_nll.copy()
    for i, info in enumerate(exits):
        here, exit_trace = taken.exit == i, trace.exits[info.checkpoint, info.head]
        agrees[here], nll[here] = exit_trace.agrees[here], exit_trace.nll[here]
    return OperatingPoint(name, round(float(taken.layers.mean()), 6), round(float(agrees.mean()), 6), _perplexity(nll))


def _static_skips(trace: SplitTrace) -> list[OperatingPoint]:
    points = []
    for checkpoint in sorted({layer for layer, _ in trace.exits}):
        rivals = [e for e in trace.exits.values() if e.checkpoint == checkpoint]
        best = max(rivals, key=lambda e: (e.agrees.mean(), -layers_in_head(e.head)))
        layers = float(checkpoint + layers_in_head(best.head))
        agreement = round(float(best.agrees.mean()), 6)
        points.append(OperatingPoint(f"layer {checkpoint}, {best.head}", layers, agreement, _perplexity(best.nll)))
    return points


def _perplexity(nll: np.ndarray) -> float:
    return round(float(np.exp(np.nanmean(nll, dtype=np.float64))), 6)


def draw_curve(curve: CostCurve) -> Figure:
    """Agreement on the left, perplexity (logarithmic) on the right, both over layers per token."""
    figure, axes = panels(["agreement with the full model", "perplexity of the held-out text"], height=3.9, share_y=False)
    for axis, measure in zip(axes, ("agreement", "perplexity"), strict=True):
        _plot(axis, curve, measure)
        axis.set_xlim(0, curve.full.layers * 1.04)
        axis.set_xlabel(f"layers run per token (of {curve.full.layers:.0f})")
    axes[0].set_ylabel("tokens that agree")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1))
    axes[1].set_ylabel("perplexity (log scale)")
    _plain_log_scale(axes[1])
    legend_below(figure, axes[0])
    return figure


def _plot(axis: Axes, curve: CostCurve, measure: str) -> None:
    static, sweep, full = curve.static, curve.sweep, curve.full
    axis.plot(*_xy(static, measure), color=MUTED, marker="s", linewidth=1, linestyle=":", label="static layer skip")
    if sweep:
        axis.plot(*_xy([*sweep, full], measure), color=COLOURS[0], label="exits, swept over the threshold")
    axis.plot(*_xy([full], measure), color=INK, marker="o", markersize=7, linestyle="none", label="full model")
    if curve.chosen is not None:
        star = {"marker": "*", "markersize": 15, "markeredgecolor": "white", "linestyle": "none"}
        axis.plot(*_xy([curve.chosen], measure), color=COLOURS[1], label="chosen (certified)", **star)


def _xy(points: Sequence[OperatingPoint], measure: str) -> tuple[list[float], list[float]]:
    return [p.layers for p in points], [getattr(p, measure) for p in points]


def _plain_log_scale(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
