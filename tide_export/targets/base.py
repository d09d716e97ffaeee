"""The interface of a target: a kind of machine, the passes that lower the graphs for it, and the builder that compiles them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tide_runtime.bundle.manifest import ProfileInfo, TargetInfo
from tide_runtime.machine_cache import CachedFiles

from tide_export.bundle_writer import onnx_weights
from tide_export.config import TrtOptions
from tide_export.graphs.cut import LoweredModel
from tide_export.passes.base import GraphPass
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.progress import ExportProgress
from tide_export.targets.graph_files import GraphFile, write_graph_file
from tide_export.weights.weight_file import WeightFile


@dataclass(frozen=True)
class Machine:
    """Description of the hardware and software of a target, as ``tide-export --list-targets`` prints it.

    Args:
        compute: the GPUs' compute capabilities, times ten; empty for a processor.
        examples: well-known devices.
        backend: runtime and supported versions.
        cuda: CUDA versions; empty for the CPU.
        built: where the target can be compiled.
        attention: fused into one kernel, or decomposed.
    """

    compute: tuple[int, ...]
    examples: str
    backend: str
    cuda: str
    built: str
    attention: str


@dataclass
class BuildJob:
    """Inputs of a builder.

    Args:
        directory: the bundle's; a target writes ``engines/<name>`` or files with its name in ``onnx``.
        workspace: temporary graph files that a compiler reads; deleted after the export.
        profiles: optimization profiles of the engines.
        rebuild: build engines even if the cache has them.
        trt: options of TensorRT engines.
    """

    directory: Path
    workspace: Path
    dtype: str
    profiles: list[ProfileInfo]
    progress: ExportProgress
    cache: CachedFiles
    rebuild: bool = False
    trt: TrtOptions = field(default_factory=TrtOptions)
    _files: dict[int, list[GraphFile]] = field(default_factory=dict)

    @cached_property
    def weights(self) -> WeightFile:
        """The weight file that all ONNX targets share; equal tensors are written once."""
        return onnx_weights(self.directory)

    def close(self) -> None:
        """Close the weight file after the last target."""
        if "weights" in self.__dict__:
            self.weights.close()

    def files(self, lowered: LoweredModel) -> list[GraphFile]:
        """The graphs of ``lowered`` as files, written once for all targets that share the lowering."""
        if id(lowered) not in self._files:
            folder = Path(tempfile.mkdtemp(dir=self.workspace))  # a failed target may have left files in another
            self._files[id(lowered)] = [write_graph_file(graph, folder) for graph in lowered.graphs]
        return self._files[id(lowered)]


class TargetBuilder(Protocol):
    """Compiles lowered graphs for one target."""

    def check(self, target: Target) -> None:
        """Raise TargetError, with the fix, if this machine cannot build ``target``."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        """Write the target's files into ``job.directory``. Raises TargetError if it cannot be compiled."""


@dataclass(frozen=True)
class Target:
    """A kind of machine and how to compile for it.

    Args:
        whole: passes on the traced model before the cut.
        pieces: passes on each graph after the cut.
        padded: passes on each graph after those, for steps of several sequences.
        uncut: also write all segments as one graph, as is done for a draft head anyway.
        int8_kv: its attention reads and writes KV caches in int8.
        drafts: it runs the draft head.
        mixed_layers: it runs layers that keep states, or read the keys and values of others.
        scores_logits: it runs a package's router that reads the logits of an exit's head.
        long_rotary: its attention takes position ids that are not the tokens' slots.
    """

    name: str
    backend: str
    dtypes: tuple[str, ...]
    machine: Machine
    builder: TargetBuilder
    whole: tuple[GraphPass, ...]
    pieces: tuple[GraphPass, ...]
    padded: tuple[GraphPass, ...] = ()
    uncut: bool = False
    int8_kv: bool = False
    drafts: bool = False
    mixed_layers: bool = False
    scores_logits: bool = False
    long_rotary: bool = False

    @property
    def low_bits(self) -> tuple[int, ...]:
        """Bits of the low-bit weights that its products take; all others are dequantised when its graphs are lowered."""
        return next((step.bits for step in self.whole if isinstance(step, QuantizeWeights)), ())

    @property
    def lowering(self) -> tuple[object, ...]:
        """Key of the lowered model: targets with equal keys share one."""
        return self.whole, self.pieces, self.padded, self.uncut, self.drafts
