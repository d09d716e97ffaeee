"""Forms for several sequences, in bundles of older releases: lazy loading, contract checks, launch counts."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runtime.bundle.test_bad_bundles import edit, rename_tensor, sign
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.base import Step
from tide_runtime.bundle.manifest import UNCUT, batched_graph, ragged_graph
from tide_runtime.errors import BundleError

OLDER = Path(__file__).parents[2] / "release_bundles/d17e495/llama_plain_packed"
FILE = "onnx/cpu.segment_1.batched.onnx"


def load_copy(directory: Path) -> Engine:
    return Engine.load(directory, EngineOptions(threads=ThreadOptions(1)))


@pytest.fixture
def load() -> Callable[[], Engine]:
    return lambda: load_copy(OLDER)


@pytest.fixture
def bundle_copy(tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return Path(shutil.copytree(OLDER, tmp_path / "bundle"))


def verify_step(engine: Engine) -> Step:
    """A step of two tokens of two sequences, which only the batched form can run."""
    step = engine.backend.context(2).step(0, [2, 2], [2, 2])
    step.input_ids[:] = [5, 6, 7, 8]
    step.place([0, 0])
    return step


def run(engine: Engine) -> np.ndarray:
    step = verify_step(engine)
    for segment in engine.manifest.segments:
        step.run(segment.name)
    return step.logits.copy()


def test_scattered_tokens_attend_by_position_not_by_slot(load: Callable[..., Engine]) -> None:
    """Guards against wrong attention after an early-exit prefill, which caches a chunk's tokens in another order."""
    with load() as engine:
        segments, text = [segment.name for segment in engine.manifest.segments], np.array([9, 5, 7, 11, 6, 8])
        context = engine.backend.context(2)
        step = context.step(0, [6], [6])
        step.input_ids[:] = text
        step.place([0])
        for segment in segments:
            step.run(segment)
        wanted, order = step.logits[[3, 5]].copy(), np.array([4, 0, 2, 1])
        for name, cache in context.caches.arrays.items():
            cache[0, :, :4] = cache[0, :, order].swapaxes(0, 1)
            cache[0, :, 4:] = 1e3 if "value" in name else 0.0
        step = context.step(0, [2], [2])
        step.input_ids[:] = text[[3, 5]]
        step.place_scattered(4, np.array([3, 5]), before=order)  # position 3 must not attend to 4; position 5 attends to all
        for segment in segments:
            step.run(segment)
        assert np.abs(step.logits - wanted).max() < 1e-4


def test_single_sequences_never_load_them(load: Callable[..., Engine]) -> None:
    """Guards against a second copy of the weights in applications with a single chat."""
    with load() as engine:
        engine.generate([5, 6, 7], GenerationParams(max_new_tokens=4, ignore_eos=True))
        assert set(engine.backend.sessions) == {UNCUT}
        verify_step(engine).run(UNCUT)
        assert set(engine.backend.sessions) == {UNCUT, batched_graph(UNCUT)}
        run(engine)
        assert set(engine.backend.sessions) == {UNCUT, batched_graph(UNCUT)} | {
            batched_graph(s.name) for s in engine.manifest.segments
        }


def decode_step(engine: Engine, lengths: list[int]) -> np.ndarray:
    """Logits of one token per sequence over zeroed caches."""
    step = engine.backend.context(len(lengths)).step(0, [1] * len(lengths), [1] * len(lengths))
    step.input_ids[:] = 5
    step.place(lengths)
    step.run(UNCUT)
    return step.logits.copy()


def test_only_uneven_sequences_load_the_ragged_form(load: Callable[..., Engine]) -> None:
    """Guards against the slower form: equal lengths are slower in the ragged form, different ones without it."""
    with load() as engine:
        even = decode_step(engine, [4, 4])
        assert set(engine.backend.sessions) == {UNCUT}
        ragged = decode_step(engine, [4, 3])
        assert set(engine.backend.sessions) == {UNCUT, ragged_graph(UNCUT)}
        assert np.abs(even[0] - ragged[0]).max() < 1e-4 < np.abs(even[1] - ragged[1]).max()
        assert engine.backend.launches == {UNCUT: 2}


def test_a_bundle_without_that_form_runs(bundle_copy: Path) -> None:
    """Guards against a failing first batch of bundles without a ragged form."""
    with load_copy(bundle_copy) as engine:
        wanted = decode_step(engine, [4, 3])
    for name in (UNCUT, "segment_0", "segment_1"):
        edit(bundle_copy, "targets", "cpu", "graphs", ragged_graph(name), remove=True)
    with load_copy(bundle_copy) as engine:
        assert np.abs(decode_step(engine, [4, 3]) - wanted).max() < 1e-4
        assert set(engine.backend.sessions) == {UNCUT}


def test_threads_load_them_once(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against concurrent requests that load several copies of the weights or see a partial set of graphs."""
    with load() as engine:
        opened, original = list[str](), engine.backend._load
        monkeypatch.setattr(engine.backend, "_load", lambda name: (opened.append(name), original(name))[1])
        results: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: results.append(run(engine))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(opened) == sorted(batched_graph(s.name) for s in engine.manifest.segments)
        assert len(results) == 4 and all(np.array_equal(results[0], other) for other in results)


def test_a_batched_launch_counts_as_one_launch_of_the_segment(load: Callable[..., Engine]) -> None:
    """Guards against wrong launch counts, by which tests prove that segments are skipped."""
    with load() as engine:
        run(engine)
        assert engine.backend.launches == {segment.name: 1 for segment in engine.manifest.segments}


def test_a_bundle_without_them_is_refused(bundle_copy: Path) -> None:
    """Guards against bundles of an older version that fail in the first batch instead of at load."""
    edit(bundle_copy, "targets", "cpu", "graphs", batched_graph("segment_1"), remove=True)
    with pytest.raises(BundleError, match=r"lacks graphs \['segment_1.batched'\].*export the bundle again"):
        load_copy(bundle_copy)


def garbage(bundle: Path) -> None:
    (bundle / FILE).write_bytes(b"not an ONNX graph" * 100)
    sign(bundle, FILE)


def renamed_input(bundle: Path) -> None:
    rename_tensor(bundle, FILE, "hidden", "stranger")


def renamed_mask(bundle: Path) -> None:
    rename_tensor(bundle, FILE, "attention_bias", "attention_bias_x")


def other_segment(bundle: Path) -> None:
    edit(bundle, "targets", "cpu", "graphs", batched_graph("segment_1"), value="onnx/cpu.segment_0.batched.onnx")


@pytest.mark.parametrize(
    ("harm", "words"),
    [(garbage, "cannot load"), (renamed_input, "stranger"), (renamed_mask, "attention_bias_x"), (other_segment, "key_cache_0")],
)
def test_a_broken_one_is_refused_when_it_is_loaded(harm: Callable[[Path], None], words: str, bundle_copy: Path) -> None:
    """Guards against wrong tokens from files that match their hash but not the contract."""
    harm(bundle_copy)
    with load_copy(bundle_copy) as engine:
        engine.generate([5, 6], GenerationParams(max_new_tokens=2, ignore_eos=True))  # a single sequence does not use it
        with pytest.raises(BundleError, match=f"{words}.*export the bundle again"):
            run(engine)
        with pytest.raises(BundleError, match="export the bundle again"):  # the next request fails in the same way
            run(engine)
