"""A GGUF file in place of a bundle, exported by the real exporter."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest
from export.quantization.tiny_gguf import tiny
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.cli.exported_model import bundle_of

from tide_export.cli import app


def test_a_gguf_file_becomes_a_bundle_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that a command gives the exporter would not be those that it takes."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    file = tiny("llama").write(tmp_path / "tiny.gguf")

    def export(arguments: list[str], lock: IO[bytes]) -> int:
        return app(arguments, standalone_mode=False) or 0

    bundle = bundle_of(str(file), export=export)
    assert [path.name for path in bundle.parent.iterdir() if path.is_dir()] == [bundle.name]
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        [generation] = engine.generate("w1", GenerationParams(max_new_tokens=4, ignore_eos=True))
    assert len(generation.token_ids) == 4
    assert bundle_of(str(file), export=None) == bundle, "exported again"
