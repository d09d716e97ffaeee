"""One model cut into even segments, several ways from one trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tide_export.config import ExportConfig
from tide_export.export import write_lowered
from tide_export.load import LoadedModel
from tide_export.lower import lower, prepare
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import find_target
from tide_export.trace import trace


def write_cuts(loaded: LoadedModel, directory: Path, segment_counts: Sequence[int], max_seq_len: int) -> None:
    """One trace, several cuts: a bundle ``directory``/segments_N of N even segments for each count."""
    context, target = LoweringContext(max_seq_len), find_target("cpu", "fp32")
    traced = trace(loaded.model)
    reports = prepare(traced, target, context)
    for count in segment_counts:
        checkpoints = [round(i * traced.num_layers / count) for i in range(1, count)]
        bundle = directory / f"segments_{count}"
        bundle.mkdir(parents=True)
        lowered = lower(traced, target, checkpoints, context)
        config = ExportConfig(max_seq_len=max_seq_len, verify=False)
        write_lowered(loaded, traced, reports, lowered, bundle, config, ExportProgress(quiet=True))
