"""Targets whose runtime compiles ONNX when it loads it: the graphs themselves are what is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tide_runtime.bundle.manifest import TargetInfo

from tide_export.bundle_writer import ONNX_FOLDER, WEIGHTS_NAME, write_graphs
from tide_export.cut import LoweredModel
from tide_export.packed_weights import WeightPacker
from tide_export.targets.base import BuildJob, Target


@dataclass(frozen=True)
class OnnxFiles:
    """Writes ONNX graphs and their weights, which needs nothing but the exporter itself.

    ``packs_fp32``: what runs the graphs packs fp32 weights when it loads them; the bundle gets them packed, where that is wanted.
    """

    packs_fp32: bool = False

    def check(self, target: Target) -> None:
        """Can always be built."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        files = write_graphs(lowered.graphs, lowered.forms, target.name, job.weights, job.progress)
        if self.packs_fp32 and job.dtype == "fp32" and job.packed_weights:
            _pack(files.values(), job)
        compute = list(target.machine.compute)
        return TargetInfo(target.backend, files, f"{ONNX_FOLDER}/{WEIGHTS_NAME}", lowered.applied, compute)


def _pack(files: Iterable[str], job: BuildJob) -> None:
    packer = WeightPacker(job.weights, job.workspace)
    with job.progress.phase("pack weights") as job.weights.progress:
        for file in files:
            packer.pack(job.directory / file)
