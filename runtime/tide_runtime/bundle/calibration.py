"""What calibration tells the runtime: where tokens may stop, how sure a router must be, what a step costs.

`tide-calibrate` writes it into calibration.json, `tide-export` copies it into the manifest, the depth policies read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from tide_runtime.errors import ParamsError

ROUTERS = ("max_probability", "mlp", "mlp+max_probability")
RECOMMENDABLE = ("exact", "exit", "full")
PADDING = 0.6  # where nobody has measured it


@dataclass(frozen=True)
class ExitInfo:
    """The early exit at one checkpoint.

    Args:
        checkpoint: layers run before it; one of the manifest's checkpoints.
        head: ``identity``, ``linear`` or ``tail:k`` (the translated state goes through the last k layers).
        router: ``max_probability`` (of the exit head), ``mlp`` (on the hidden state, before the head is run) or
            ``mlp+max_probability`` (the head is run only when the MLP agrees).
        exact_threshold: policy ``exact`` drafts while the router's score is at least this, 0 … 1.
        exit_threshold: policy ``exit`` stops here when the score is at least this; None: no threshold was certified.
        mlp_threshold: least score of the MLP before the head is asked, with router ``mlp+max_probability``.

    Raises ParamsError for a head or router that does not exist, or a threshold that is no probability.
    """

    checkpoint: int
    head: str
    router: str
    exact_threshold: float
    exit_threshold: float | None = None
    mlp_threshold: float | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"identity|linear|tail:[1-9]\d*", self.head):
            raise ParamsError(f"head is {self.head!r}, expected identity, linear or tail:k")
        if self.router not in ROUTERS:
            raise ParamsError(f"router is {self.router!r}, expected one of {', '.join(ROUTERS)}")
        for name in ("exact_threshold", "exit_threshold", "mlp_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ParamsError(f"{name} is {value}, expected 0 … 1")
        if self.router == "mlp+max_probability" and self.mlp_threshold is None:
            raise ParamsError("router mlp+max_probability has no mlp_threshold")

    @cached_property
    def tail_layers(self) -> int:
        """How many of the model's last layers the exit head runs."""
        return int(self.head.removeprefix("tail:")) if self.head.startswith("tail:") else 0

    @property
    def asks_mlp(self) -> bool:
        return self.router in ("mlp", "mlp+max_probability")

    def graph_outputs(self) -> tuple[str, ...]:
        """Outputs of the exit's graph: ``score`` [B, S] of the MLP, ``hidden_out`` [B, S, H] translated; none: no graph."""
        return ("score",) * self.asks_mlp + ("hidden_out",) * (self.head != "identity")


def cuts(exits: Sequence[ExitInfo], num_layers: int) -> list[int]:
    """Where a model of ``num_layers`` is cut to use ``exits``: after each one's layers, and before their tails; rising."""
    return sorted({e.checkpoint for e in exits} | {num_layers - e.tail_layers for e in exits if e.tail_layers})


@dataclass(frozen=True)
class CertificateInfo:
    """P(disagreement rate > ``max_disagreement``) <= 1 - ``confidence``, over text like the calibration data.

    Args:
        max_disagreement: ε, the share of a document's tokens (``unit`` document: on average over documents; ``token``: of all
            tokens) whose exit differs from the full model's argmax.
        confidence: 1 - δ.
        method: how thresholds were chosen, with the source.
        unit: what was counted as independent: ``token`` or ``document``.
        tokens, documents: size n of the threshold split.
        measured: disagreement rate on that split with the chosen thresholds.
        data_sha256: hash over the documents of the threshold split.
        date: ISO 8601.
    """

    max_disagreement: float
    confidence: float
    method: str
    unit: str
    tokens: int
    documents: int
    measured: float
    data_sha256: str
    date: str


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of launching graphs on ``rows`` rows of ``seq`` tokens each, on average where it is no whole number.

    A segment of n layers takes ``launch_ms + n * layer_ms``, the last one ``logits_ms`` more; ``head_ms`` is the graph
    ``head``; ``exit_ms`` a router or translator graph; ``host_ms`` what the runtime's own loop adds to one decode step.
    Beyond that it adds ``ask_extra_ms`` where it asks an exit, ``deep_extra_ms`` where it takes what waits through the
    remaining layers.
    """

    rows: int
    seq: float
    launch_ms: float
    layer_ms: float
    head_ms: float
    exit_ms: float
    host_ms: float
    ask_extra_ms: float = 0.0
    deep_extra_ms: float = 0.0

    def towards(self, other: StepCost, share: float) -> StepCost:
        """What lies at ``share`` of the way to ``other``, a step of as many rows; beyond it, where that is more than 1."""
        parts = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "rows"}
        return StepCost(self.rows, **{name: ms + share * (getattr(other, name) - ms) for name, ms in parts.items()})

    @property
    def logits_ms(self) -> float:
        """The head inside the last segment, which needs no launch of its own."""
        return max(0.0, self.head_ms - self.launch_ms)


@dataclass(frozen=True)
class CostTable:
    """Step costs measured on ``target`` of ``machine``.

    Args:
        unsplit_ms: one decode step of the uncut model, one row.
        warm_shares: layers of a prefix → what it and the head take in the 1st, 2nd, … turn that stops early after a pass through
            all layers, over their cost among such passes: the processor's caches keep small ones. Empty: nobody has measured.
        padding: what a token that pads a shorter row takes of a real one's time, 0 … 1.
        draw_ms: choosing a token at random instead of the likeliest one. ``exact`` charges its exits with it, copies are not.
    """

    target: str
    machine: str
    unsplit_ms: float
    steps: list[StepCost]
    warm_shares: dict[str, list[float]] = field(default_factory=dict)
    padding: float = PADDING
    draw_ms: float = 0.0


@dataclass(frozen=True)
class CalibrationInfo:
    """Everything the depth policies use.

    Args:
        exits: at most one per checkpoint, shallow first; empty when nothing agrees early enough.
        draft_limit: most tokens that ``exact`` drafts before it runs the rest of the layers.
        recommended: the policy to use by default: ``exact``, ``exit`` or ``full``.
        predicted: policy → modelled speedup over the uncut model, one row, greedy.
        exit_depths: layers → share of the tokens that policy ``exit`` is expected to say after them; empty: nobody has asked.
        certificate: of the exit thresholds; None when none holds.
        costs: measured step costs; None when they were not measured.

    Raises ParamsError for a negative draft limit, an unknown policy, or tails of several lengths: a tail
    is the bundle's last segment, and there is one of those.
    """

    exits: list[ExitInfo]
    draft_limit: int
    recommended: str
    predicted: dict[str, float] = field(default_factory=dict)
    certificate: CertificateInfo | None = None
    costs: CostTable | None = None
    exit_depths: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.draft_limit < 0:
            raise ParamsError(f"draft_limit is {self.draft_limit}, expected at least 0 tokens")
        if self.recommended not in RECOMMENDABLE:
            raise ParamsError(f"recommended is {self.recommended!r}, expected one of {', '.join(RECOMMENDABLE)}")

        tails = sorted({e.tail_layers for e in self.exits})
        if len(tails) > 1:
            raise ParamsError(
                f"the exits' tails have {' and '.join(map(str, tails))} layers, expected one length for all (0: no tail), as a "
                "token that stops without the tail leaves no keys and values there for those that run it"
            )

    @property
    def tail_layers(self) -> int:
        """How many of the model's last layers the exits run as their tail; 0: they have none."""
        return self.exits[0].tail_layers if self.exits else 0

    def cuts(self, num_layers: int) -> list[int]:
        """Where a model of ``num_layers`` is cut to use the exits; rising."""
        return cuts(self.exits, num_layers)
