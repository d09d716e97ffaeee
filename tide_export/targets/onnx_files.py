"""Builder of targets whose runtime compiles ONNX at load: it writes the graphs themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tide_runtime.bundle.manifest import TargetInfo

from tide_export.bundle_writer import ONNX_FOLDER, WEIGHTS_NAME, write_graphs
from tide_export.cut import LoweredModel
from tide_export.packed_weights import WeightPacker
from tide_export.products_graph import write_products
from tide_export.targets.base import BuildJob, Target


@dataclass(frozen=True)
class OnnxFiles:
    """Writes ONNX graphs and their weights; needs no compiler.

    ``packs_fp32``: the runtime packs fp32 weights at load; ``BuildJob.packed_weights`` then also writes the packed layout.
    """

    packs_fp32: bool = False

    def check(self, target: Target) -> None:
        """Every machine can build it."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        forms = [*lowered.forms, *([lowered.draft] if lowered.draft is not None else [])]
        files = write_graphs(lowered.graphs, forms, target.name, job.weights, job.progress)
        if self.packs_fp32 and job.dtype == "fp32" and job.packed_weights:
            _pack(files.values(), job)
        compute = list(target.machine.compute)
        products = write_products([*lowered.graphs, *lowered.forms], target.name, job.directory)
        return TargetInfo(target.backend, files, f"{ONNX_FOLDER}/{WEIGHTS_NAME}", lowered.applied, compute, products=products)


def _pack(files: Iterable[str], job: BuildJob) -> None:
    packer = WeightPacker(job.weights, job.workspace)
    with job.progress.phase("pack weights") as job.weights.progress:
        for file in files:
            packer.pack(job.directory / file)
