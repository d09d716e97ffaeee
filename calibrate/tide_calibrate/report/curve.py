"""Inference cost–performance curve: layers per token against agreement and perplexity, swept over the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, ScalarFormatter
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo

from tide_calibrate.certificate.risk import ExitRule, ThresholdFamily
from tide_calibrate.report.canvas import COLOURS, INK, MUTED, house_style, legend_below, panels
from tide_calibrate.report.histogram import stops, thresholds_of
from tide_calibrate.traces.trace import SplitTrace

SWEEP_POINTS = 49


@dataclass(frozen=True)
class OperatingPoint:
    """Cost and quality of one configuration on the test text.

    Args:
        name: the configuration: thresholds, a static skip, or the full model.
        layers: mean layers run per token.
        agreement: share of tokens whose likeliest next token is the full model's.
        perplexity: perplexity of the test text (exp of the mean nats per token).
    """

    name: str
    layers: float
    agreement: float
    perplexity: float


@dataclass(frozen=True)
class CostCurve:
    """The sweep over the family of thresholds, the chosen thresholds, and the baselines.

    Args:
        sweep: from safest to boldest thresholds; empty when there are no exits.
        chosen: the certified thresholds of policy ``exit``; None when there are none.
        static: for each candidate, every token stopping there, with the head of the highest agreement.
        full: the full model.
    """

    sweep: list[OperatingPoint]
    chosen: OperatingPoint | None
    static: list[OperatingPoint]
    full: OperatingPoint


def cost_curve(trace: SplitTrace, exits: Sequence[ExitInfo], family: ThresholdFamily | None) -> CostCurve:
    """Evaluate policy ``exit`` on the tokens of ``trace``, at the thresholds of ``exits`` and at those of ``family``."""
    sweep = [] if family is None else [_point(name, member, trace, exits) for name, member in _spread(family)]
    certified = any(info.exit_threshold is not None for info in exits)
    chosen = _point("certified thresholds", thresholds_of(exits, "exit"), trace, exits) if certified else None
    full = OperatingPoint("full", float(trace.num_layers), 1.0, _perplexity(trace.full_nll))
    return CostCurve(sweep, chosen, _static_skips(trace), full)


def _spread(family: ThresholdFamily) -> list[tuple[str, NDArray[np.float64]]]:
    picked = np.unique(np.linspace(0, len(family.wrong) - 1, SWEEP_POINTS).round().astype(int))
    return [(f"{family.wrong[i]:.3%} wrong exits tolerated", family.thresholds[i]) for i in picked]


def _point(
    name: str, thresholds: Sequence[float] | NDArray[np.float64], trace: SplitTrace, exits: Sequence[ExitInfo]
) -> OperatingPoint:
    stopped = stops(trace, exits, thresholds)
    agrees = np.ones(stopped.exit_index.size, np.bool_)
    nll = trace.full_nll.copy()
    for i, info in enumerate(exits):
        here = stopped.exit_index == i
        exit_trace = trace.exits[info.checkpoint, info.head]
        agrees[here], nll[here] = exit_trace.agrees[here], exit_trace.nll[here]
    return OperatingPoint(name, round(float(stopped.layers.mean()), 6), round(float(agrees.mean()), 6), _perplexity(nll))


def _static_skips(trace: SplitTrace) -> list[OperatingPoint]:
    points = []
    for checkpoint in sorted({layer for layer, _ in trace.exits}):
        best = max((e for e in trace.exits.values() if e.checkpoint == checkpoint), key=lambda e: e.agrees.mean())
        layers = float(ExitRule(checkpoint, best.head, "").layers())
        agreement = round(float(best.agrees.mean()), 6)
        points.append(OperatingPoint(f"layer {checkpoint}, {best.head}", layers, agreement, _perplexity(best.nll)))
    return sorted(points, key=lambda point: point.layers)


def _perplexity(nll: np.ndarray) -> float:
    return round(float(np.exp(np.nanmean(nll, dtype=np.float64))), 6)


@house_style
def draw_curve(curve: CostCurve) -> Figure:
    """Draw agreement on the left and perplexity (logarithmic) on the right, both over layers per token."""
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
    static = curve.static
    sweep = curve.sweep
    full = curve.full
    axis.plot(*_xy(static, measure), color=MUTED, marker="s", linewidth=1, linestyle=":", label="static layer skip")
    if sweep:
        axis.plot(*_xy(sweep, measure), color=COLOURS[0], marker=".", label="exits, swept over their thresholds")
    axis.plot(*_xy([full], measure), color=INK, marker="o", markersize=7, linestyle="none", label="full model")
    if curve.chosen is not None:
        star: dict[str, Any] = {"marker": "*", "markersize": 15, "markeredgecolor": "white", "linestyle": "none"}
        axis.plot(*_xy([curve.chosen], measure), color=COLOURS[1], label="chosen (certified)", **star)


def _xy(points: Sequence[OperatingPoint], measure: str) -> tuple[list[float], list[float]]:
    return [p.layers for p in points], [getattr(p, measure) for p in points]


def _plain_log_scale(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())


def describe_curve(curve: CostCurve) -> str:
    """Describe the chart in words (alternative text)."""
    points = [curve.full, *([curve.chosen] if curve.chosen is not None else []), *curve.static]
    return "Layers per token against agreement and perplexity. " + " ".join(
        f"{_label(p, curve)}: {p.layers:.1f} layers, agreement {p.agreement:.1%}, perplexity {p.perplexity:.4g}." for p in points
    )


def _label(point: OperatingPoint, curve: CostCurve) -> str:
    return f"static skip at {point.name}" if point in curve.static else point.name
