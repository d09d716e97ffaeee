"""What a target is: a kind of machine, the passes that lower the contract's graphs for it, and the builder that compiles them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tide_runtime.bundle.manifest import ProfileInfo, TargetInfo

from tide_export.bundle_writer import onnx_weights
from tide_export.cut import LoweredModel
from tide_export.passes.base import GraphPass
from tide_export.progress import ExportProgress
from tide_export.targets.engine_cache import EngineCache
from tide_export.targets.graph_files import GraphFile, write_graph_file
from tide_export.targets.trt_options import TrtOptions
from tide_export.weights import WeightFile


@dataclass(frozen=True)
class Machine:
    """What a target runs on, in the words of ``tide-export --list-targets``.

    Args:
        compute: the GPUs' compute capabilities, times ten; empty for a processor.
        examples: machines that people know.
        backend: what runs it, with the versions that do.
        cuda: versions of CUDA; empty without one.
        built: where it can be compiled.
        attention: fused into one kernel, or taken apart.
    """

    compute: tuple[int, ...]
    examples: str
    backend: str
    cuda: str
    built: str
    attention: str


@dataclass
class BuildJob:
    """What builders work with.

    Args:
        directory: the bundle's; a target fills ``engines/<name>`` or files of its name in ``onnx``.
        workspace: for graphs on their way into a compiler; deleted after the export.
        profiles: the kinds of steps that engines are to take.
        rebuild: build engines that the cache has.
        trt: what is asked of TensorRT's engines.
        packed_weights: put fp32 weights into the bundle as the CPU packs them, too.
    """

    directory: Path
    workspace: Path
    dtype: str
    profiles: list[ProfileInfo]
    progress: ExportProgress
    cache: EngineCache
    rebuild: bool = False
    trt: TrtOptions = field(default_factory=TrtOptions)
    packed_weights: bool = True
    _files: dict[int, list[GraphFile]] = field(default_factory=dict)

    @cached_property
    def weights(self) -> WeightFile:
        """Shared by all ONNX targets: a tensor that several have is written once."""
        return onnx_weights(self.directory)

    def close(self) -> None:
        """End of the last target's build."""
        if "weights" in self.__dict__:
            self.weights.close()

    def files(self, lowered: LoweredModel) -> list[GraphFile]:
        """The graphs of ``lowered`` as files; written once, however many targets are made from them."""
        if id(lowered) not in self._files:
            folder = self.workspace / str(len(self._files))
            folder.mkdir()
            self._files[id(lowered)] = [write_graph_file(graph, folder) for graph in lowered.graphs]
        return self._files[id(lowered)]


class TargetBuilder(Protocol):
    """Compiles lowered graphs for one target."""

    def check(self, target: Target) -> None:
        """Raise TargetError, with what to do about it, when this machine cannot build ``target``."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        """Write the target's files into ``job.directory``. Raises TargetError when it cannot be compiled."""


@dataclass(frozen=True)
class Target:
    """``whole``: passes on the traced model before it is cut; ``pieces``: passes on each graph after the cut.

    ``several_rows``: passes that make of a lowered segment its form for steps of several rows; none: one form serves all.
    ``ragged_rows``: those of its form for one token each of several rows of different lengths, where that is another.
    ``kv_fill``: passes on the graphs that fill skipped layers' caches; none: the target has no such graphs.
    ``uncut``: all segments are wanted as one graph too.
    """

    name: str
    backend: str
    dtypes: tuple[str, ...]
    machine: Machine
    builder: TargetBuilder
    whole: tuple[GraphPass, ...]
    pieces: tuple[GraphPass, ...]
    several_rows: tuple[GraphPass, ...] = ()
    ragged_rows: tuple[GraphPass, ...] = ()
    kv_fill: tuple[GraphPass, ...] = ()
    uncut: bool = False

    @property
    def lowering(self) -> tuple[object, ...]:
        """What decides about it: targets with the same share one."""
        return self.whole, self.pieces, self.several_rows, self.ragged_rows, self.kv_fill, self.uncut
