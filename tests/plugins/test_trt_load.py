"""`tide_plugins.trt.load` registers the plugin library with TensorRT, or raises an error that says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from tide_plugins import trt
from tide_runtime.errors import TargetError


class Registry:
    """A stand-in for TensorRT's plugin registry that refuses duplicate plugins."""

    def __init__(self) -> None:
        self.known: set[tuple[str, str, str]] = set()
        self.loaded: list[str] = []
        self.readable = True

    def get_creator(self, name: str, version: str, namespace: str) -> object | None:
        return object() if (name, version, namespace) in self.known else None

    def load_library(self, path: str) -> object | None:
        if not self.readable or self.known:
            return None
        self.loaded.append(path)
        self.known = {("TideExitRouter", "1", "tide"), ("TideExitSelect", "1", "tide")}
        return object()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry, module = Registry(), ModuleType("tensorrt")
    module.__dict__.update(get_plugin_registry=lambda: registry, __version__="11.1.0")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.delenv("TIDE_PLUGINS_LIBRARY", raising=False)
    return registry


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libtide_plugins.so"
    path.touch()
    return path


def test_the_library_is_loaded_once(registry, library):
    """Guards against a failing second engine: TensorRT refuses plugins that are already registered."""
    trt.load(library)
    trt.load(library)
    trt.load()
    assert registry.loaded == [str(library)]


def test_the_library_may_be_named_in_the_environment(registry, library, monkeypatch):
    """Guards against an ignored environment variable."""
    monkeypatch.setenv("TIDE_PLUGINS_LIBRARY", str(library))
    trt.load()
    assert registry.loaded == [str(library)]


def test_what_is_missing_is_said(registry, library, tmp_path, monkeypatch):
    """Guards against TensorRT's unexplained None."""
    with pytest.raises(TargetError, match="TIDE_PLUGINS_LIBRARY"):
        trt.load()
    with pytest.raises(TargetError, match=r"no plugin library .*absent\.so"):
        trt.load(tmp_path / "absent.so")
    registry.readable = False
    with pytest.raises(TargetError, match=r"TensorRT 11\.1\.0 cannot load"):
        trt.load(library)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(TargetError, match=r"pip install 'tide-llm\[tensorrt\]'"):
        trt.load(library)
