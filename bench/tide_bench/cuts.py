"""One model cut in several ways, from one trace: tracing is most of an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress
from tide_export.trace import TracedModel, trace


def write_cuts(loaded: LoadedModel, cuts: Mapping[Path, str], dtype: str, max_seq_len: int) -> None:
    """Write a bundle into each folder of ``cuts``, made here, cut at the checkpoints given (see `ExportConfig`); unverified."""
    traced = trace(loaded.model)
    for folder, checkpoints in cuts.items():
        folder.mkdir(parents=True)
        config = ExportConfig(dtype=dtype, max_seq_len=max_seq_len, checkpoints=checkpoints, verify=False)
        copy = TracedModel(traced.model.clone(), traced.kv_shapes)
        write_bundle(loaded, folder, config, ExportProgress(quiet=True), traced=copy)
