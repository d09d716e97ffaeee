"""The cache of compiled images: complete entries or none, also with concurrent writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tide_plugins.build.cubin_cache import CachedImage, CubinCache, content_key
from tide_plugins.build.resources import Resources
from tide_runtime.machine_cache import cache_folder

_IMAGE = CachedImage(b"\x7fELF and more", {"tide_k_f32": Resources(32, 1024, 0, 0, 0)})


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cache")
    assert cache.load("key") is None
    cache.store("key", _IMAGE)
    assert cache.load("key") == _IMAGE
    assert [path.name for path in cache.folder.iterdir()] == ["key"]  # no partial entry remains


@pytest.mark.parametrize("kept", [-1, 10, 0])
def test_a_damaged_image_is_made_again(tmp_path: Path, kept: int) -> None:
    """Guards against a truncated cubin, after a full disk, that is loaded at every start."""
    cache = CubinCache(tmp_path)
    cache.store("key", _IMAGE)
    (tmp_path / "key").write_bytes((tmp_path / "key").read_bytes()[:kept])
    assert cache.load("key") is None
    cache.store("key", _IMAGE)
    assert cache.load("key") == _IMAGE


def test_keys_differ_where_the_parts_do() -> None:
    """Guards against equal keys of different sources, such as 'ab','c' and 'a','bc'."""
    assert len({content_key(parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), (b"abc", ""))}) == 4
    assert content_key(["ab", "c"]) == content_key([b"ab", b"c"])


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a fixed folder, as home directories may be read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDE_CACHE_DIR", raising=False)
    assert cache_folder("cubins") == tmp_path / "tide" / "cubins"
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder("cubins") == tmp_path / "here" / "cubins"
