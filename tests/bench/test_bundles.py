"""Cached bundles: the key that tells when they are made again."""

from __future__ import annotations

from tide_bench.bundles import export_key


def test_the_key_reads_the_exporters_files() -> None:
    """Guards against a key over files that have moved: every compiled arm would fail to start."""
    assert export_key("weights") == export_key("weights") != export_key("other weights")
