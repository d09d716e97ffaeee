"""The interface of a graph pass: a function that rewrites one ONNX graph and reports where it applied, and where not and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from tide_runtime.backends.onnxruntime.invariance import PADDINGS

from tide_export.quantize.kv_scales import KVScales
from tide_export.weights.deferred_weight import LowBits


@dataclass(frozen=True)
class LoweringContext:
    """Parameters of the passes.

    Args:
        max_seq_len: KV cache slots per sequence, in tokens.
        quantized: low-bit weights by parameter name.
        kv_scales: of the int8 caches by layer number; empty: the caches have the model's dtype.
        long_rotary_from: see `Manifest`.
    """

    max_seq_len: int
    quantized: Mapping[str, LowBits] = field(default_factory=dict)
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)
    long_rotary_from: int | None = None

    @property
    def cache_slots(self) -> int:
        """Slots of a sequence's cache, with those that attention pads into on any processor."""
        return self.max_seq_len + max(padding.sequence.max_added for padding in PADDINGS)

    @property
    def position_ids(self) -> int:
        """Positions that a token may have in a step, those of padding included."""
        return (self.long_rotary_from or 0) + self.cache_slots

    def quantized_weight(self, initializer: str | None) -> LowBits | None:
        """The low-bit form of a traced parameter; the trace puts ``model.`` before the parameter's name."""
        return self.quantized.get((initializer or "").removeprefix("model."))


@dataclass
class PassReport:
    """How often a pass applied, and the reason for each place where it did not."""

    name: str
    applied: int = 0
    skipped: list[str] = field(default_factory=list)

    def skip(self, where: str | None, reason: str) -> None:
        self.skipped.append(f"{where}: {reason}")


GraphPass = Callable[[ir.Model, LoweringContext], PassReport]


@dataclass(frozen=True)
class PlacedPass:
    """A pass of a package, and where it is run. An entry point of the group ``tide.passes`` names one.

    Args:
        targets: names of the targets that lower with it.
        after: name of the pass that it follows: of a function, or of a class such as ``QuantizeWeights``.
        package: name and version; set where it is found.
    """

    run: GraphPass
    targets: tuple[str, ...]
    after: str
    package: str = ""

    def __call__(self, model: ir.Model, context: LoweringContext) -> PassReport:
        report = self.run(model, context)
        return replace(report, name=f"{report.name} ({self.package})")


def pass_name(graph_pass: GraphPass) -> str:
    """The name by which `PlacedPass.after` finds a pass."""
    return getattr(graph_pass, "__name__", type(graph_pass).__name__)


def run_passes(model: ir.Model, passes: Sequence[GraphPass], context: LoweringContext) -> list[PassReport]:
    """Run ``passes`` in order on ``model`` (in place); return their reports."""
    return [graph_pass(model, context) for graph_pass in passes]
