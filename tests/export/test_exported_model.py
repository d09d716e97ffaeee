"""A GGUF file in place of a bundle, exported by the real exporter."""

from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from export.sources.gguf.tiny_gguf import tiny
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.cli.exported_model import bundle_of

from tide_export.cli import app
from tide_export.config import ExportConfig
from tide_export.export_run import ExportRun


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
    assert read_manifest(bundle_of(str(file), max_seq_len=16, export=export)).max_seq_len == 16


def test_a_context_shorter_than_the_models_is_named() -> None:
    """Breaks: a model of 131,072 positions is cut to 4,096 tokens without a word."""
    notes: list[str] = []
    progress: Any = SimpleNamespace(note=notes.append)
    for positions, chosen in ((131072, None), (131072, 8192), (448, None)):
        loaded: Any = SimpleNamespace(positions=positions)
        run = ExportRun(loaded, Path(), ExportConfig(max_seq_len=chosen), progress)
        assert run._cache_slots() == (chosen or min(positions, 4096))
    assert notes == ["the context is 4096 tokens of the model's 131072; --max-seq-len takes more"]
