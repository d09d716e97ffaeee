"""A bundle with another manifest, for arms that need a certain behaviour: its files are the first one's, by hard links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import MANIFEST_NAME, Manifest

DRAFT_LIMIT = 5


def write_changed(bundle: Path, folder: Path, manifest: Manifest) -> Path:
    """``folder``, made here: the files of ``bundle``, on the same disk, under ``manifest``."""
    shutil.copytree(bundle, folder, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder


def with_exits(manifest: Manifest, checkpoints: Sequence[int], known: CalibrationInfo | None = None) -> Manifest:
    """``manifest`` with an uncalibrated exit at each of ``checkpoints``: an identity head that is always sure.

    Args:
        known: whose costs and predictions policies are to go by; None: the runtime's guess.
    """
    exits = [ExitInfo(c, "identity", "max_probability", 0.0, 0.0) for c in checkpoints]
    info = CalibrationInfo(exits, DRAFT_LIMIT, "exact")
    if known is not None:
        info = replace(info, predicted=known.predicted, costs=known.costs, exit_depths=known.exit_depths)
    return replace(manifest, calibration=info)
