"""Targets whose runtime compiles ONNX when it loads it: the graphs themselves are what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tide_runtime.manifest import TargetInfo

from tide_export.bundle_writer import ONNX_FOLDER, WEIGHTS_NAME, write_graphs

from .base import BuildJob, Target

if TYPE_CHECKING:
    from tide_export.lower import LoweredModel


class OnnxFiles:
    """Writes ONNX graphs and their weights, which needs nothing but the exporter itself."""

    def check(self, target: Target) -> None:
        """Can always be built."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        files = write_graphs(lowered.graphs, lowered.forms, target.name, job.weights, job.progress)
        return TargetInfo(target.backend, files, f"{ONNX_FOLDER}/{WEIGHTS_NAME}", lowered.applied)
