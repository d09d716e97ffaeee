"""Bundles that a comparison needs besides the one it is about: exported once, kept while nothing they depend on changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import MANIFEST_NAME, Manifest

from tide_bench.build_cache import cached_folder, files_digest, run_in_process

DRAFT_LIMIT = 5


def export_key(identity: str) -> str:
    """Changes when the weights, the exporter, its tools or the bundle's schema do."""
    exporter = files_digest([*sorted(_package("tide_export").rglob("*.py")), _package("tide_runtime") / "bundle" / "manifest.py"])
    tools = [f"{name} {version(name)}" for name in ("torch", "transformers", "onnxscript", "onnx-ir")]
    return "\n".join([identity, exporter, *tools])


def export_bundle(
    model: Path,
    identity: str,
    folder: Path,
    checkpoints: str = "auto",
    dtype: str = "fp32",
    max_seq_len: int | None = None,
    **options: Any,
) -> Path:
    """The bundle of ``model``, cut at ``checkpoints``, exported again when `export_key` has changed.

    ``options``: further fields of `ExportConfig`; None: its default.
    """
    given = {name: value for name, value in options.items() if value is not None}
    key = "\n".join([_key(identity, checkpoints, dtype, max_seq_len), *(f"{name} {value}" for name, value in given.items())])
    given |= {"checkpoints": checkpoints, "dtype": dtype, "max_seq_len": max_seq_len}
    return cached_folder(folder, key, lambda empty: run_in_process(_export, str(model), empty / "bundle", given)) / "bundle"


def _key(identity: str, checkpoints: str, dtype: str, max_seq_len: int | None) -> str:
    key = export_key(identity) + ("" if checkpoints == "auto" else f"\ncut at {checkpoints}")
    return key + ("" if (dtype, max_seq_len) == ("fp32", None) else f"\n{dtype}, {max_seq_len} slots")


def _package(name: str) -> Path:
    """The folder of a package, which is not imported, because that would import torch."""
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations  # both come with this distribution
    return Path(next(iter(spec.submodule_search_locations)))


def _export(model: str, out: Path, options: Mapping[str, Any]) -> None:
    from tide_export import export
    from tide_export.config import ExportConfig

    export(model, out, ExportConfig(verify=False, **options))


def write_changed(bundle: Path, folder: Path, manifest: Manifest) -> Path:
    """``folder``, made here: the files of ``bundle``, on the same disk, under ``manifest``."""
    shutil.copytree(bundle, folder, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder


def with_exits(manifest: Manifest, checkpoints: Sequence[int]) -> Manifest:
    """``manifest`` with an uncalibrated exit at each of ``checkpoints``: an identity head that is always sure."""
    exits = [ExitInfo(c, "identity", "max_probability", 0.0, 0.0) for c in checkpoints]
    return replace(manifest, calibration=CalibrationInfo(exits, DRAFT_LIMIT, "exact"))
