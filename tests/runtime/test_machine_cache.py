"""Results of measurements and files that are costly to make, kept between processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tide_runtime import machine_cache
from tide_runtime.machine_cache import CachedFiles, cache_folder, kept_result, key_name, queued_seconds


def measured_twice(folder: Path, max_queued: float) -> list[int]:
    """What two calls return where every measurement gives another number."""
    numbers = iter(range(2))
    return [kept_result("n", ["k"], lambda: next(numbers), int, int, folder, max_queued) for _ in range(2)]


@pytest.mark.parametrize(("queued", "found"), [(0.0, [0, 0]), (10.0, [0, 1])])
def test_what_was_measured_on_a_busy_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: float, found: list[int]
) -> None:
    """One disturbed first load would make every later engine draft by wrong costs: int4 replies were 14% slower with them."""
    waited: Iterator[float] = iter([0.0, queued, 0.0, queued])
    monkeypatch.setattr(machine_cache, "queued_seconds", lambda: next(waited))
    assert measured_twice(tmp_path, max_queued=0.1) == found


def test_results_that_load_does_not_change_are_kept_whatever_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter(range(10))
    monkeypatch.setattr(machine_cache, "queued_seconds", lambda: float(next(waited)))
    assert measured_twice(tmp_path, max_queued=float("inf")) == [0, 0]


def test_waiting_for_a_core_is_counted_and_never_falls() -> None:
    """Where the counter could not be read, nothing would ever be found disturbed."""
    before = queued_seconds()
    assert 0 <= before <= queued_seconds()


_FACTS, _CONTENT = {"build_seconds": 1.5}, b"\x7fELF\nof two lines"


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    cache = CachedFiles(tmp_path / "cache")
    assert cache.load("key") is None
    cache.store("key", _FACTS, _CONTENT)
    assert cache.load("key") == (_FACTS, _CONTENT)
    assert [path.name for path in cache.folder.iterdir()] == ["key"]  # no partial entry remains


@pytest.mark.parametrize(
    "damage", [lambda file: file[:-1], lambda file: file[:10], lambda file: b"", lambda file: file[:-1] + b"\0"]
)
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A truncated cubin, after a full disk, would be loaded at every start, and a disk's error go into every bundle."""
    cache = CachedFiles(tmp_path)
    cache.store("key", _FACTS, _CONTENT)
    (tmp_path / "key").write_bytes(damage((tmp_path / "key").read_bytes()))
    assert cache.load("key") is None
    cache.store("key", _FACTS, _CONTENT)
    assert cache.load("key") == (_FACTS, _CONTENT)


def test_names_differ_where_the_parts_do() -> None:
    assert len({key_name(parts) for parts in (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"])}) == 4


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Home directories may be read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDE_CACHE_DIR", raising=False)
    assert cache_folder("cubins") == tmp_path / "tide" / "cubins"
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder("cubins") == tmp_path / "here" / "cubins"
