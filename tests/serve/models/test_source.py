"""A bundle on a disk that others write to."""

import shutil
from pathlib import Path

import pytest
from tide_runtime import EngineOptions
from tide_serve.models.source import BundleSource, LoadPlan


def test_a_bundle_that_changes_while_it_is_read_is_read_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: a model is loaded by the manifest of the bundle that was replaced, until the server is restarted."""
    source = BundleSource(Path(shutil.copytree(bundle, tmp_path / "bundle")), EngineOptions(), 2**30)
    manifest, sized = source.directory / "manifest.json", BundleSource.sized

    def then_replaced(self: BundleSource) -> LoadPlan:
        plan = sized(self)
        manifest.write_text(manifest.read_text() + "\n")
        return plan

    with monkeypatch.context() as during:
        during.setattr(BundleSource, "sized", then_replaced)
        first = source.verified()
    again = source.verified()
    assert again is not first and source.verified() is again
