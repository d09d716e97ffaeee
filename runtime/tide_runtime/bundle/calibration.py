"""Calibration results in the manifest: exits with their thresholds, certificate, and step costs.

`tide-calibrate` writes it into calibration.json, `tide-export` copies it into the manifest, the depth policies read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tide_runtime.bundle.layer_info import KVInfo
from tide_runtime.errors import ParamsError

OWN_HEAD = r"identity|linear|tail:[1-9]\d*"
ROUTERS = ("max_probability", "mlp", "mlp+max_probability", "gate")
RECOMMENDABLE = ("exact", "exit", "full")


@dataclass(frozen=True)
class ExitInfo:
    """The early exit at one checkpoint.

    Args:
        checkpoint: layers run before it; one of the manifest's checkpoints.
        head: ``identity``, ``linear`` or ``tail:k`` (the translated state goes through the last k layers), or a package's.
        router: ``max_probability`` (of the exit head), ``mlp`` (on the hidden state, before the head is run),
            ``mlp+max_probability`` (the head is run only when the MLP agrees), ``gate`` (the exit gate of a looped model, as an
            MLP: its probability to leave after this loop), or a package's.
        exact_threshold: policy ``exact`` drafts while the router's score is at least this, 0 … 1.
        exit_threshold: policy ``exit`` stops here when the score is at least this; None: no threshold was certified.
        mlp_threshold: least score of the MLP for which the head is evaluated, with router ``mlp+max_probability``.
        head_package, router_package: name and version of the package outside TIDE that made it; empty: TIDE's own. It is not
            needed to run the bundle, which has their graphs.
        reads_logits: a package's router scores the head's logits, after the head was run; otherwise the hidden state, before.

    Raises ParamsError for a head or router that does not exist, or a threshold that is no probability.
    """

    checkpoint: int
    head: str
    router: str
    exact_threshold: float
    exit_threshold: float | None = None
    mlp_threshold: float | None = None
    head_package: str = ""
    router_package: str = ""
    reads_logits: bool = False

    def __post_init__(self) -> None:
        if not self.head_package and not re.fullmatch(OWN_HEAD, self.head):
            raise ParamsError(f"head is {self.head!r}, expected identity, linear or tail:k")
        if not self.router_package and self.router not in ROUTERS:
            raise ParamsError(f"router is {self.router!r}, expected one of {', '.join(ROUTERS)}")
        for name in ("exact_threshold", "exit_threshold", "mlp_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ParamsError(f"{name} is {value}, expected 0 … 1")
        if self.router == "mlp+max_probability" and self.mlp_threshold is None:
            raise ParamsError("router mlp+max_probability has no mlp_threshold")

    @cached_property
    def tail_layers(self) -> int:
        """Number of the model's last layers that the exit head runs."""
        return int(self.head.removeprefix("tail:")) if self.head.startswith("tail:") else 0

    @cached_property
    def has_mlp(self) -> bool:
        """Whether the router scores the hidden state: by the MLP, or by a package's graph."""
        return self.decides_before_head or self.router == "mlp+max_probability"

    @cached_property
    def decides_before_head(self) -> bool:
        """Whether the score of the hidden state decides alone, so that the head is run for tokens that stop only."""
        return not self.reads_logits if self.router_package else self.router in ("mlp", "gate")

    @cached_property
    def scores_logits(self) -> bool:
        """Whether a graph scores the head's logits."""
        return bool(self.router_package) and self.reads_logits

    def graph_outputs(self) -> tuple[str, ...]:
        """Outputs of the exit's graph: the router's ``score`` [B, S] of the hidden state, and the translated ``hidden_out``
        [B, S, H]. Empty: no graph."""
        return ("score",) * self.has_mlp + ("hidden_out",) * (self.head != "identity")


def cuts(exits: Sequence[ExitInfo], num_layers: int) -> list[int]:
    """Increasing depths at which a model of ``num_layers`` is cut for ``exits``: at their checkpoints and before their tails."""
    return sorted({e.checkpoint for e in exits} | {num_layers - e.tail_layers for e in exits if e.tail_layers})


@dataclass(frozen=True)
class CertificateInfo:
    """P(disagreement rate > ``max_disagreement``) <= 1 - ``confidence``, over text like the calibration data.

    Args:
        max_disagreement: ε, the share of a document's tokens (``unit`` document: on average over documents; ``token``: of all
            tokens) whose exit differs from the argmax of the full model, or of ``reference``.
        confidence: 1 - δ.
        method: how thresholds were chosen, with the source.
        unit: the independent sample: ``token`` or ``document``.
        tokens, documents: size n of the threshold split.
        measured: disagreement rate on that split at the chosen thresholds.
        data_sha256: hash over the documents of the threshold split.
        date: ISO 8601.
        reference: the model whose argmax the exit is compared with; empty: the full depth of the calibrated model itself.
        reference_sha256: fingerprint of the reference's weights; empty where ``reference`` is.
        full_disagreement: rate on the threshold split at which the calibrated model's full depth differs from the reference, as
            rounded weights do; 0 where ``reference`` is empty.
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
    reference: str = ""
    reference_sha256: str = ""
    full_disagreement: float = 0.0

    @property
    def compared_with(self) -> str:
        """Name of the model whose tokens the certificate's rate is counted against."""
        return self.reference or "the full model"


@dataclass(frozen=True)
class DraftHeadInfo:
    """The draft head, which guesses tokens from states of tokens that all layers have run for.

    Args:
        layers: layers run before each of the states that it reads, rising; the number of all layers: the final state, before the
            model's final norm.
        width: numbers in what it reads of a token, and in its own state.
        vocabulary: number of tokens that it chooses from.
        acceptance: share of its 1st, 2nd, … guesses after right ones that are right, on the model's own continuations.
        classes: [score, share] with rising scores: the share of guesses with at least this score, and less than the next, that
            are right.
        kind: ``own``, which the calibration trained; others came with a checkpoint: ``eagle3``, ``mtp``.
        kv: the cache of its attention to all tokens before; None: it reads the last token alone.
        source, sha256: where it came from, and the hash over its tensors; empty for the calibration's.

    Raises ParamsError for a width that is none, shares that are none, or no class.
    """

    layers: list[int]
    width: int
    vocabulary: int
    acceptance: list[float]
    classes: list[list[float]]
    kind: str = "own"
    kv: KVInfo | None = None
    source: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ParamsError(f"width is {self.width}, expected at least 1")
        shares = [*self.acceptance, *(number for pair in self.classes for number in pair)]
        if any(len(pair) != 2 for pair in self.classes) or not self.classes or not all(0 <= share <= 1 for share in shares):
            raise ParamsError(f"acceptance is {self.acceptance} and classes {self.classes}, expected shares from 0 to 1")


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of running graphs on ``rows`` sequences of ``seq`` tokens each; a fractional ``seq`` is an average.

    A segment of n layers takes ``launch_ms + n * layer_ms``, the last one ``logits_ms`` more; ``head_ms`` is the graph
    ``head``, ``exit_ms`` a router or translator graph. The runtime's loop adds ``host_ms`` to each decode step, and
    ``extra_host_ms`` besides where an exit is evaluated, waiting tokens run the remaining layers, or drafts are verified.
    """

    rows: int
    seq: float
    launch_ms: float
    layer_ms: float
    head_ms: float
    exit_ms: float
    host_ms: float
    extra_host_ms: float = 0.0

    @cached_property
    def logits_ms(self) -> float:
        """Cost of the head inside the last segment, which needs no separate launch."""
        return max(0.0, self.head_ms - self.launch_ms)


@dataclass(frozen=True)
class CostTable:
    """Step costs measured on ``target`` of ``machine``.

    Args:
        unsplit_ms: one decode step of the uncut model for one sequence.
        steps: costs by number of sequences and tokens.
    """

    target: str
    machine: str
    unsplit_ms: float
    steps: list[StepCost]


@dataclass(frozen=True)
class CalibrationInfo:
    """Everything that the depth policies use.

    Args:
        exits: at most one per checkpoint, shallow first; empty when no exit is accurate enough.
        draft_limit: most tokens that ``exact`` drafts before it runs the rest of the layers.
        recommended: the policy to use by default: ``exact``, ``exit`` or ``full``.
        predicted: policy → speedup over the uncut model for one sequence, greedy: measured at the end of the calibration, or
            modelled for policies without a ``predicted_range``.
        predicted_range: policy → [low, high], which holds the speedup over other texts of the same kind in 95% of cases.
        exit_depths: layers → expected share of tokens that policy ``exit`` generates at this depth; empty: not computed.
        draft_head: the one that was trained; None: there is none. The manifest has it in a field of its own.
        certificate: guarantee of the exit thresholds; None when there is none.
        costs: measured step costs; None when they were not measured.

    Raises ParamsError for a negative draft limit, an unknown policy, a range that is none, or tails of different lengths, because
    the tail is the bundle's last segment.
    """

    exits: list[ExitInfo]
    draft_limit: int
    recommended: str
    predicted: dict[str, float] = field(default_factory=dict)
    certificate: CertificateInfo | None = None
    costs: CostTable | None = None
    exit_depths: dict[str, float] = field(default_factory=dict)
    draft_head: DraftHeadInfo | None = None
    predicted_range: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.draft_limit < 0:
            raise ParamsError(f"draft_limit is {self.draft_limit}, expected at least 0 tokens")
        if self.recommended not in RECOMMENDABLE:
            raise ParamsError(f"recommended is {self.recommended!r}, expected one of {', '.join(RECOMMENDABLE)}")
        if any(len(ends) != 2 or not 0 < ends[0] <= ends[1] for ends in self.predicted_range.values()):
            raise ParamsError(f"predicted_range is {self.predicted_range}, expected two rising speedups for each policy")
        tails = sorted({e.tail_layers for e in self.exits})
        if len(tails) > 1:
            raise ParamsError(
                f"the exits' tails have {' and '.join(map(str, tails))} layers, expected one length for all (0: no tail), as a "
                "token that stops without the tail leaves no keys and values there for those that run it"
            )

    @property
    def has_weights(self) -> bool:
        """Whether anything was trained."""
        return bool(self.exits) or self.draft_head is not None

    @property
    def tail_layers(self) -> int:
        """Number of the model's last layers that the exits run as their tail, or 0."""
        return self.exits[0].tail_layers if self.exits else 0

    def cuts(self, num_layers: int) -> list[int]:
        """Increasing depths at which a model of ``num_layers`` is cut for the exits."""
        return cuts(self.exits, num_layers)
