"""Prefixes on disk: a text that returns after a restart or an eviction is taken over, and no file changes a text."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.backends.host_blocks import HostBlocks
from tide_runtime.cached_folders import folder_bytes
from tide_runtime.errors import ParamsError
from tide_runtime.prefix_cache_folder import PrefixCacheFolder
from tide_runtime.scheduling import prefix_cache

OPTIONS = EngineOptions(policy="full", max_batch=2, threads=ThreadOptions(1))
ASKED = GenerationParams(max_new_tokens=6, logprobs=2, ignore_eos=True)
BLOCK = 16
BLOCK_BYTES = BLOCK * 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, fp32
FEW_BLOCKS = 5 * BLOCK_BYTES  # one text, and not the next one's prefix
PROMPT = np.random.default_rng(0).integers(3, 280, 40).tolist()
KEY = b"k" * 32


def ask(engine: Engine, prompt: list[int], **changes: object) -> Generation:
    return engine.generate(prompt, replace(ASKED, **changes))[0]  # type: ignore[arg-type]


def same(found: Generation, wanted: Generation) -> bool:
    return (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


def wait_written(engine: Engine, files: int) -> None:
    deadline = time.monotonic() + 10
    while engine.stats().prefix_disk.writes < files:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Callable[[list[int]], Generation]:
    """What a text is with nothing kept."""
    return lambda prompt: ask(engine, prompt, use_prefix_cache=False)


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Callable[..., Engine]:
    """An engine with a folder, as a process would load it after a restart."""
    return lambda **changes: engine.with_options(replace(OPTIONS, **{"prefix_dir": str(tmp_path / "kept"), **changes}))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_chat_goes_on_after_a_restart(start: Callable[..., Engine], alone: Callable[[list[int]], Generation]) -> None:
    """Breaks: history that is computed again, other bits than before, and a reply that is not kept."""
    with start() as engine:
        first = ask(engine, PROMPT)
    text = [*PROMPT, *first.token_ids, 7, 8, 9]  # 49 tokens, 48 of which are before the one that gives logits
    with start() as engine:
        again, following = ask(engine, PROMPT), ask(engine, text)
        counts = engine.stats().prefix_disk
        metrics = engine.metrics()
    # `again` is in memory up to its last token, which no step has run for.
    assert (again.stats.prefix_tokens, following.stats.prefix_tokens) == (2 * BLOCK, len(text) - 4)
    assert same(again, alone(PROMPT)) and same(following, alone(text))
    assert (counts.reads, counts.read_bytes) == (2, 2 * BLOCK_BYTES)
    assert "tide_prefix_disk_reads_total 2\n" in metrics
    with start() as engine:
        assert ask(engine, [*text, 5, 6]).stats.prefix_tokens == 3 * BLOCK


def test_an_evicted_prefix_comes_back(start: Callable[..., Engine], alone: Callable[[list[int]], Generation]) -> None:
    """Breaks: prefixes that are lost with the memory that others take."""
    others = [[10 + n, *PROMPT] for n in range(3)]
    with start(kv_memory=FEW_BLOCKS, max_batch=1) as engine:
        ask(engine, PROMPT)
        wait_written(engine, 2)
        for other in others:
            ask(engine, other)
        before = engine.stats().prefix_disk.reads
        found = ask(engine, PROMPT)
        assert engine.stats().prefix_disk.reads > before
    assert found.stats.prefix_tokens == 2 * BLOCK and same(found, alone(PROMPT))


def test_reading_beside_decodes_changes_no_text(
    start: Callable[..., Engine], alone: Callable[[list[int]], Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: requests that wait for the disk, which are read a block a step here, and those that run meanwhile."""
    monkeypatch.setattr(prefix_cache, "MAX_DISK_BLOCKS_PER_STEP", 1)
    long = PROMPT[:4]
    with start() as engine:
        for last in (1, 2, 3):
            ask(engine, [*PROMPT, last])
    with start() as engine:
        running = engine.submit(long, replace(ASKED, max_new_tokens=50))
        chunks = iter(running)
        next(chunks)
        handles = [engine.submit([*PROMPT, last], ASKED) for last in (1, 2, 3)]
        found = [handle.result() for handle in handles]
        assert len(list(chunks)) == 49 and running.result().token_ids[:6] == alone(long).token_ids
        # They share the prefix where they run one after the other; those that find room at the same time read it each.
        assert 2 <= engine.stats().prefix_disk.reads <= 6
    assert all(one.stats.prefix_tokens == 2 * BLOCK and same(one, alone([*PROMPT, n])) for n, one in enumerate(found, 1))


def test_a_slow_disk_does_not_hold_up_callers(
    start: Callable[..., Engine], alone: Callable[[list[int]], Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: all streams of a server, its probes and its metrics stop while a prompt's prefix is looked for on a slow disk."""
    entered, may_go_on, has = threading.Event(), threading.Event(), PrefixCacheFolder.has

    def has_slowly(files: PrefixCacheFolder, key: bytes) -> bool:
        entered.set()
        assert may_go_on.wait(60)
        return has(files, key)

    with start() as engine, ThreadPoolExecutor() as pool:
        ask(engine, PROMPT[:4])  # before the first step there is no disk
        monkeypatch.setattr(PrefixCacheFolder, "has", has_slowly)
        try:
            first = engine.submit(PROMPT, ASKED)
            assert entered.wait(60)
            stats = pool.submit(engine.stats).result(30)
            added = pool.submit(engine.submit, PROMPT[1:], ASKED).result(30)
            cancelled = pool.submit(engine.submit, PROMPT[2:], ASKED).result(30)
            pool.submit(cancelled.cancel).result(30)
        finally:
            may_go_on.set()
        assert (stats.running, stats.waiting, cancelled.result(60).finish_reason) == (1, 0, "cancelled")
        assert same(first.result(60), alone(PROMPT)) and same(added.result(60), alone(PROMPT[1:]))


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a flipped bit": lambda own, other: own[:99] + bytes([own[99] ^ 4]) + own[100:],
    "a flipped bit of the digest": lambda own, other: bytes([own[0] ^ 1]) + own[1:],
    "cut short": lambda own, other: own[: len(own) // 2],
    "too long": lambda own, other: own + b"\0",
    "another text's": lambda own, other: other,
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_miss(
    start: Callable[..., Engine],
    alone: Callable[[list[int]], Generation],
    tmp_path: Path,
    damage: Callable[[bytes, bytes], bytes],
    which: int,
) -> None:
    """Breaks: a disk's fault that changes a text or ends the engine, and files that stay broken."""
    other = [*PROMPT[1:], 4]
    with start() as engine:
        ask(engine, other)
    foreign = [path.read_bytes() for path in files(tmp_path / "kept")]
    with start() as engine:
        ask(engine, PROMPT)
        keys = engine._loop.scheduler.cache.disk.keys(np.array(PROMPT), (None, False))  # type: ignore[union-attr]
    path = tmp_path / "kept" / keys.blocks[which].hex()[:2] / keys.blocks[which].hex()
    whole = path.read_bytes()
    path.write_bytes(damage(whole, foreign[0]))
    with start() as engine:
        found = ask(engine, PROMPT)
        assert engine.stats().prefix_disk.damaged == 1
    assert found.stats.prefix_tokens == which * BLOCK and same(found, alone(PROMPT))
    assert path.read_bytes() == whole  # written again


@pytest.mark.parametrize("kind", ["folder", "link", "unreadable"])
def test_what_is_no_file_is_a_miss(start: Callable[..., Engine], tmp_path: Path, kind: str) -> None:
    """Breaks: an engine that ends because somebody put something else in a file's place."""
    with start() as engine:
        wanted = ask(engine, PROMPT)
    for path in files(tmp_path / "kept"):
        if kind == "unreadable":
            path.chmod(0)
            continue
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to("/nowhere")
    with start() as engine:
        assert same(ask(engine, PROMPT), wanted)


def test_what_decides_the_bits_keeps_files_apart(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: keys and values of another model, another processor's kernels, other launches or another policy."""
    with start() as engine:
        ask(engine, PROMPT)
    for changes in ({"policy": "exact"}, {"bits": "fast"}):
        with start(**changes) as engine:
            found = ask(engine, PROMPT)
            assert (found.stats.prefix_tokens, engine.stats().prefix_disk.reads) == (0, 0)
    with start() as engine:
        facts = engine.backend.bits_key
        weights = [info.sha256 for info in engine.manifest.files.values() if info.sha256 in facts]
        assert weights and str(engine.backend.default_padding) in facts  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.backend, "machine_key", ["another processor", *facts[1:]])
    with start() as engine:
        assert ask(engine, PROMPT).stats.prefix_tokens == 0


def test_salted_texts_stay_in_memory(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Breaks: a tenant's texts in files, and a tenant's request that tells what others have asked."""
    with start() as engine:
        ask(engine, PROMPT, cache_salt="tenant")
        ask(engine, PROMPT, use_prefix_cache=False)
    assert not files(tmp_path / "kept")
    with start() as engine:
        ask(engine, PROMPT)
    with start() as engine:
        for changes in ({"cache_salt": "tenant"}, {"use_prefix_cache": False}):
            assert ask(engine, PROMPT, **changes).stats.prefix_tokens == 0


def test_the_folder_keeps_to_its_limit_and_what_is_used(start: Callable[..., Engine], tmp_path: Path) -> None:
    """Breaks: a full disk, a text in daily use that goes before one that never returned, and a user's own files."""
    (tmp_path / "kept" / "00").mkdir(parents=True)
    others = [tmp_path / "kept" / "notes.txt", tmp_path / "kept" / "00" / "notes.txt"]
    for other in others:
        other.write_text("mine")
    with start() as engine:
        ask(engine, PROMPT)
    size = sum(path.stat().st_size + 4096 for path in files(tmp_path / "kept"))
    limit = 4 * size  # four texts of two blocks, but for the pages
    with start(prefix_disk=limit) as engine:
        for first in range(12):
            ask(engine, [20 + first, *PROMPT])
            ask(engine, PROMPT)
            assert folder_bytes(tmp_path / "kept") <= limit
    with start(prefix_disk=limit) as engine:
        assert ask(engine, PROMPT).stats.prefix_tokens == 2 * BLOCK
        assert ask(engine, [20, *PROMPT]).stats.prefix_tokens == 0
    assert all(other.exists() for other in others)


def test_a_piece_that_changes_meanwhile_is_not_written(tmp_path: Path) -> None:
    """Breaks: files of a block that another text took over while it was written."""
    kept, memory = PrefixCacheFolder(tmp_path, 2**20), HostBlocks(2, 100)
    memory.content(1)[:] = 7
    for change in (lambda: memory.change([1]), lambda: memory.release([1]), memory.close):
        before = memory.versions[1]
        change()
        kept.write(KEY, [memory.content(1)], lambda before=before: memory.versions[1] == before)  # type: ignore[misc]
        assert not kept.has(KEY) and not files(tmp_path)


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: half a file on a full disk."""
    kept = PrefixCacheFolder(tmp_path, 2**20)
    monkeypatch.setattr(os, "rename", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        kept.write(KEY, [np.zeros(9, np.uint8)], lambda: True)
    assert not files(tmp_path)


def test_a_full_disk_is_announced_and_the_engine_goes_on(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: requests that fail because of the disk, and a folder that silently keeps nothing."""
    monkeypatch.setattr(os, "writev", lambda *given: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        with start() as engine:
            wanted = ask(engine, PROMPT)
        with start() as engine:
            assert same(ask(engine, PROMPT), wanted)


def test_an_engine_that_its_writing_thread_drops_ends(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: memory that is never given back where the garbage of an engine is found in the thread that writes its prefixes."""
    engines, asked, write = [start()], threading.Event(), PrefixCacheFolder.write

    def dropping(*arguments: object) -> None:
        assert asked.wait(60)
        engines.clear()
        gc.collect()
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixCacheFolder, "write", dropping)
    loop = engines[0]._loop
    ask(engines[0], PROMPT)
    asked.set()
    assert loop._thread is not None
    loop._thread.join(60)
    assert not loop._thread.is_alive() and not engines


_PROCESS = """
import sys
from runtime.test_prefix_disk import ASKED, FEW_BLOCKS, OPTIONS, PROMPT, Engine, Path, replace
options = replace(OPTIONS, prefix_dir=Path(sys.argv[2]), prefix_disk=90_000, max_batch=1, kv_memory=FEW_BLOCKS)
with Engine.load(sys.argv[1], options) as engine:
    for turn in range(1000):
        for first in (1, 2, 3):
            print(engine.generate([first, *PROMPT], ASKED)[0].token_ids)
        if turn >= 15 and engine.stats().prefix_disk.reads:  # what writes has the lowest priority
            break
    else:
        print("nothing was read")
"""


def test_two_processes_share_a_folder(engine: Engine, bundle: Path, tmp_path: Path, start: Callable[..., Engine]) -> None:
    """Breaks: files that one process deletes while the other reads or counts them, and half-written ones."""
    arguments = [sys.executable, "-c", _PROCESS, str(bundle), str(tmp_path / "kept")]
    paths = os.pathsep.join(["tests", *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    wanted = [str(ask(engine, [first, *PROMPT], use_prefix_cache=False).token_ids) for first in (1, 2, 3)]
    for process in running:
        lines = process.communicate(timeout=60)[0].splitlines()
        assert process.returncode == 0
        assert lines == len(lines) // 3 * wanted
    assert not list((tmp_path / "kept").glob(".tide-*"))
    with start(prefix_disk=90_000) as mine:
        assert [str(ask(mine, [first, *PROMPT]).token_ids) for first in (1, 2, 3)] == wanted


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"prefix_cache": False}, "prefix_cache is off"),
        ({"prefix_disk": 0}, "prefix_disk is 0"),
        ({"prefix_dir": Path(__file__)}, "give a folder that this user can write"),
        ({"prefix_dir": Path("/proc/nowhere")}, "give a folder that this user can write"),
    ],
)
def test_what_cannot_be_kept_is_refused(start: Callable[..., Engine], changes: dict[str, object], why: str) -> None:
    """Breaks: a folder that is named and never used."""
    with pytest.raises(ParamsError, match=why):
        start(**changes)
