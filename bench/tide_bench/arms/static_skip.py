"""Static layer skip: every token is the prediction of the model's own head after the same few layers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tide_runtime.bundle.manifest import read_manifest

from tide_bench.arms.tide import TideArm
from tide_bench.changed_bundle import with_exits, write_changed


class StaticSkipArm(TideArm):
    """A bundle with one cut: policy ``exit`` with an exit there that is always sure."""

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        self._changed = TemporaryDirectory(dir=folder.parent)  # on the same disk, for hard links
        super().__init__(write_changed(folder, Path(self._changed.name) / "bundle", with_exits(manifest, manifest.checkpoints)))
