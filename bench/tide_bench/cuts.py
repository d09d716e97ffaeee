"""One model cut in several ways, from one trace: tracing is most of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tide_export.config import ExportConfig
from tide_export.export import write_lowered
from tide_export.load import LoadedModel
from tide_export.lower import lower, prepare
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import find_target
from tide_export.trace import trace


def write_cuts(loaded: LoadedModel, cuts: Mapping[Path, Sequence[int]], dtype: str, max_seq_len: int) -> None:
    """Write a bundle for the CPU into each folder of ``cuts``, made here, with cuts behind the layers given; not verified."""
    context, target = LoweringContext(max_seq_len), find_target("cpu", dtype)
    traced = trace(loaded.model)
    reports = prepare(traced, target, context)
    for folder, checkpoints in cuts.items():
        folder.mkdir(parents=True)
        lowered = lower(traced, target, checkpoints, context)
        config = ExportConfig(dtype=dtype, max_seq_len=max_seq_len, verify=False)
        write_lowered(loaded, traced, reports, lowered, folder, config, ExportProgress(quiet=True))
