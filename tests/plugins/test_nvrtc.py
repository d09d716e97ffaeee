"""NVRTC works wherever its wheel lies."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
from tide_plugins.build.nvrtc import Nvrtc


def test_the_builtins_library_is_loaded_before_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-cuda-nvrtc 13.0, which torch 2.11 installs, has no RPATH: every compilation failed with "failed to open
    libnvrtc-builtins.so.13.0" unless a CUDA toolkit was on the library path."""
    names = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0")
    for name in names:
        (tmp_path / name).touch()
    opened: list[str] = []

    def open_library(path: str) -> SimpleNamespace:
        opened.append(Path(path).name)
        return SimpleNamespace(nvrtcGetErrorString=SimpleNamespace())

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    Nvrtc(tmp_path / names[0])
    assert opened == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]
