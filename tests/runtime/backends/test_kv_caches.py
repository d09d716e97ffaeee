"""Rows of KV caches: only written slots take memory, released rows give theirs back and hide nothing that was NaN."""

import mmap
import sys

import numpy as np
import pytest
from runtime.backends.cache_shapes import LOOPED, MIXED, PAGED, UNPAGED, fill, manifest, resident_bytes
from tide_runtime.backends import lazy_memory
from tide_runtime.backends.kv_caches import BLOCK_TOKENS, KVCaches, cache_full
from tide_runtime.backends.lazy_memory import LazyMemory
from tide_runtime.bundle.manifest import KVInfo, Manifest
from tide_runtime.errors import DeviceMemoryError

linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
MIB = 1 << 20


@pytest.fixture(params=["pages", "array"])
def any_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The memory of Linux, and that of other systems."""
    if request.param == "array":
        monkeypatch.setattr(lazy_memory, "_ON_LINUX", False)
    elif sys.platform != "linux":
        pytest.skip("pages are given back on Linux only")
    return str(request.param)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_arrays_have_the_manifests_shapes_and_are_zero(any_memory: str, dtype: type[np.generic]) -> None:
    """Guards against layers that share memory, and against a wrong price of a block of tokens."""
    caches = KVCaches(UNPAGED, dtype, 2, spare_slots=1)
    shapes = {name: array.shape for name, array in caches.arrays.items()}
    assert caches.limit == 76
    assert shapes == {
        "key_cache_0": (2, 3, caches.slots, 5),
        "value_cache_0": (2, 3, caches.slots, 7),
        "key_cache_1": (2, 1, caches.slots, 9),
        "value_cache_1": (2, 1, caches.slots, 3),
    }
    assert all(array.flags.c_contiguous and array.flags.writeable and not array.any() for array in caches.arrays.values())
    assert caches.block_bytes == BLOCK_TOKENS * (3 * 5 + 3 * 7 + 9 + 3) * np.dtype(dtype).itemsize
    wanted = fill(caches)
    assert all(np.array_equal(array, wanted[name]) for name, array in caches.arrays.items())


@linux
def test_rows_begin_on_pages_where_that_takes_few_slots() -> None:
    """Guards against rows that share pages, which are then overwritten instead of given back, and against attention over many
    slots that were only added for the sake of pages."""
    caches = KVCaches(PAGED, np.float32, 3, spare_slots=1)
    assert caches.limit < caches.slots <= caches.limit + BLOCK_TOKENS
    assert all(array[row].ctypes.data % mmap.PAGESIZE == 0 for array in caches.arrays.values() for row in range(3))
    assert KVCaches(UNPAGED, np.float32, 3).slots == UNPAGED.max_seq_len


@pytest.mark.parametrize("shapes", [PAGED, MIXED, UNPAGED])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_released_row_leaves_the_others_alone(any_memory: str, shapes: Manifest, row: int) -> None:
    """Guards against a released sequence that takes pages of its neighbours with it."""
    caches = KVCaches(shapes, np.float32, 3)
    wanted = fill(caches)
    caches.release(row)
    for name, array in caches.arrays.items():
        others = [index for index in range(3) if index != row]
        np.testing.assert_array_equal(array[others], wanted[name][others])
        assert any_memory == "array" or not array[row].any()


def test_loops_of_a_row_lie_side_by_side(any_memory: str) -> None:
    """Guards against a loop that reads another one's keys, or another sequence's, and against one that is not released."""
    caches = KVCaches(LOOPED, np.float32, 3, loops=2)
    wanted = fill(caches)
    assert list(caches.arrays) == list(KVCaches(LOOPED, np.float32, 1).arrays)
    assert caches.block_bytes == KVCaches(LOOPED, np.float32, 1).block_bytes
    for first, second in (("key_cache_1", "key_cache_3"), ("value_cache_0", "value_cache_2")):
        assert caches.by_loop[first].flags.c_contiguous
        np.testing.assert_array_equal(caches.by_loop[first][0::2], wanted[first])
        np.testing.assert_array_equal(caches.by_loop[first][1::2], wanted[second])
    assert all(array[1:2].flags.c_contiguous for array in caches.arrays.values())
    caches.release(1)
    for name, array in caches.arrays.items():
        np.testing.assert_array_equal(array[[0, 2]], wanted[name][[0, 2]])
        assert any_memory == "array" or not array[1].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shapes", [PAGED, MIXED, UNPAGED])
def test_a_released_row_holds_no_nan(any_memory: str, shapes: Manifest, dtype: type[np.generic], value: float) -> None:
    """Guards against the NaN of a failed request in the next text, where attention's mask multiplies it by 0."""
    caches = KVCaches(shapes, dtype, 3)
    for array in caches.arrays.values():
        array[1, :, :60] = 1
        array[1, -1, 60] = value
        array[1, 0, caches.slots - 1] = 1 if array[1].any() else 0
    for array in caches.arrays.values():
        array[1, :, 61 : caches.slots // 2] = value
    caches.release(1)
    assert all(np.isfinite(array).all() for array in caches.arrays.values())


@linux
def test_a_released_row_returns_its_memory() -> None:
    """Guards against memory that grows until every row has been as long as it may get."""
    caches = KVCaches(PAGED, np.float32, 3)
    size = sum(array[0].nbytes for array in caches.arrays.values())
    before = resident_bytes()
    for _ in range(3):
        for array in caches.arrays.values():
            array[1] = 1
        written = resident_bytes()
        caches.release(1)
        released = resident_bytes()
        assert written - before > size * 0.9
        assert released - before < size * 0.1


@linux
def test_unused_slots_take_no_memory() -> None:
    """Guards against caches that take all their memory when an engine is loaded, and for short texts."""
    before = resident_bytes()
    caches = KVCaches(manifest(1 << 20, *[KVInfo(4, 128, 128)] * 2), np.float32, 16)
    assert sum(array.nbytes for array in caches.arrays.values()) > 100_000 * MIB
    for array in caches.arrays.values():
        array[:, :, :BLOCK_TOKENS] = 1
    written = 16 * caches.block_bytes
    assert written * 0.9 < resident_bytes() - before < written + 8 * MIB


@linux
def test_no_huge_pages() -> None:
    """Guards against 2 MiB for the first token of a row on systems that use huge pages unasked."""
    memory = LazyMemory(64 * MIB)
    address, inside = memory.bytes.ctypes.data, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split(" ", 1)[0]
            if "-" in first:
                start, end = (int(part, 16) for part in first.split("-"))
                inside = start <= address < end
            elif inside and line.startswith("VmFlags"):
                assert "nh" in line.split()
                return
    pytest.fail("the mapping is not in /proc/self/smaps")


@linux
def test_refused_address_space_names_the_remedy() -> None:
    """Guards against a bare OSError when a limit of the system is too low for the caches."""
    with pytest.raises(DeviceMemoryError, match=r"refuses \d+ bytes.*fewer sequences.*ulimit -v"):
        LazyMemory(1 << 61)


@linux
@pytest.mark.parametrize(
    ("start", "end"), [(0, 0), (5, 5), (5, 100), (0, 4096), (1, 8192), (4096, 20_000), (4000, 12_300), (4097, 8191)]
)
def test_give_back_clears_the_range_and_nothing_else(start: int, end: int) -> None:
    """Guards against rounding a range to the wrong pages."""
    memory = LazyMemory(20_000)
    memory.bytes[:] = 1
    assert memory.give_back(start, end)
    assert not memory.bytes[start:end].any()
    assert memory.bytes[:start].all() and memory.bytes[end:].all()


def test_moving_a_row_copies_its_cached_tokens(any_memory: str) -> None:
    """Guards against a sequence that loses tokens, or overwrites a neighbour, when it moves into a gap of the batch."""
    caches = KVCaches(MIXED, np.float32, 3)
    wanted = fill(caches)
    caches.move_row(2, 0, 37)
    for name, array in caches.arrays.items():
        wanted[name][0, :, :37] = wanted[name][2, :, :37]
        np.testing.assert_array_equal(array, wanted[name])


@linux
def test_closed_caches_take_no_memory_while_a_binding_still_reads_them() -> None:
    """Guards against a crash of a bound step after `close`, and against memory that a forgotten reference keeps."""
    caches = KVCaches(PAGED, np.float32, 3)
    fill(caches)
    kept, size = list(caches.arrays.values()), sum(array.nbytes for array in caches.arrays.values())
    before = resident_bytes()
    caches.close()
    assert before - resident_bytes() > size * 0.9
    assert not any(array.any() for array in kept)


def test_the_error_of_a_full_cache_names_the_option() -> None:
    """Guards against an error that leaves open how to get a longer cache."""
    assert "ends at slot 65, the KV cache has 64" in str(cache_full(65, 64))
    assert "--max-seq-len 65" in str(cache_full(65, 64))
