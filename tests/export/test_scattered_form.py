"""The form of a segment for prompt tokens in another order than the text's: what it computes, lazy loading, launch counts."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from export.architectures import LAYERS, tiny_model
from export.stub_calibration import write_calibration
from runtime.bundle.corruption import edit, rename_tensor, sign
from tide_runtime import DepthOptions, Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.backends.base import Step
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import batched_graph, read_manifest
from tide_runtime.errors import BundleError

from tide_export import ExportConfig
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.export import write_bundle
from tide_export.load import LoadedModel, fingerprint
from tide_export.progress import ExportProgress

FILE = "onnx/cpu.segment_1.batched.onnx"
PARAMS = GenerationParams(max_new_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with exits after layers 1 and 2, which prompts may stop at."""
    loaded, folder = LoadedModel(tiny_model("llama"), None, "llama"), tmp_path_factory.mktemp("scattered")
    exits = [ExitInfo(layer, "identity", "max_probability", 0.5) for layer in (1, 2)]
    write_calibration(folder / "calibration", exits, fingerprint(loaded), LAYERS, 64)
    config = ExportConfig(max_seq_len=48, verify=False)
    (folder / "bundle").mkdir()
    exit_calibration = read_exit_calibration(folder / "calibration")
    write_bundle(loaded, folder / "bundle", config, ExportProgress(quiet=True), exit_calibration)
    return folder / "bundle"


@pytest.fixture
def bundle_copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def load(directory: Path) -> Engine:
    return Engine.load(directory, EngineOptions(threads=ThreadOptions(1), policy="full"))


def test_prompts_stop_at_exits_over_the_caches_that_decoding_reads(bundle: Path) -> None:
    """Prompt tokens in another order than the text's would attend to later ones, or the text be decoded from other slots."""
    forms = {name for name in read_manifest(bundle).targets["cpu"].graphs if "." in name}
    assert forms == {"segment_0.batched", "segment_1.batched", "segment_2.batched"}
    prompt, params = [3, 4, 5, 9, 7, 8, 11] * 3, GenerationParams(max_new_tokens=12, ignore_eos=True, logprobs=1)

    def scores(text: Generation) -> list[float]:
        return [token.logprob for token in text.logprobs or ()]

    def generate(chunk: int, threshold: float) -> Generation:
        depth = DepthOptions(threshold=threshold, kv="propagate", prefill_exit=True)
        options = EngineOptions(policy="exit", threads=ThreadOptions(1), prefill_chunk=chunk, depth=depth)
        with Engine.load(bundle, options) as engine:
            return engine.generate(prompt, params)[0]

    with Engine.load(bundle, EngineOptions(policy="full", threads=ThreadOptions(1))) as engine:
        whole = engine.generate(prompt, params)[0].token_ids
    for threshold, stopped in ((1.0, {0}), (0.012, {10})):
        texts = [generate(chunk, threshold) for chunk in (1, 3, 64)]
        assert {text.stats.prompt_exits for text in texts} == stopped
        assert len({text.token_ids for text in texts}) == 1
        for other in texts[1:]:
            np.testing.assert_allclose(scores(other), scores(texts[0]), rtol=0, atol=1e-5)
        assert (texts[0].token_ids == whole) == (stopped == {0})


def scattered_step(engine: Engine) -> Step:
    """A step of two tokens of one sequence, placed by position, which only the batched form can run."""
    step = engine.backend.context(1).step(0, [2], [2])
    step.input_ids[:2] = [5, 6]
    step.place_scattered(0, np.array([1, 0]), before=np.empty(0, np.int64))
    return step


def run(engine: Engine) -> np.ndarray:
    step = scattered_step(engine)
    for segment in engine.manifest.segments:
        step.run(segment.name)
    return step.logits[:2].copy()


def batched_forms(engine: Engine) -> set[str]:
    return {batched_graph(segment.name) for segment in engine.manifest.segments}


def test_scattered_tokens_attend_by_position_not_by_slot(bundle: Path) -> None:
    """Guards against wrong attention after an early-exit prefill, which caches a chunk's tokens in another order."""
    with load(bundle) as engine:
        segments, text = [segment.name for segment in engine.manifest.segments], np.array([9, 5, 7, 11, 6, 8])
        context = engine.backend.context(1)
        step = context.step(0, [6], [6])
        step.input_ids[:6] = text
        step.place([0])
        for segment in segments:
            step.run(segment)
        wanted, order = step.logits[[3, 5]].copy(), np.array([4, 0, 2, 1])
        for name, cache in context.caches.arrays.items():
            cache[0, :, :4] = cache[0, :, order].swapaxes(0, 1)
            cache[0, :, 4:] = 1e3 if "value" in name else 0.0
        step = context.step(0, [2], [2])
        step.input_ids[:2] = text[[3, 5]]
        step.place_scattered(4, np.array([3, 5]), before=order)  # position 3 must not attend to 4; position 5 attends to all
        for segment in segments:
            step.run(segment)
        assert np.abs(step.logits[:2] - wanted).max() < 1e-4


def test_texts_in_order_never_load_them(bundle: Path) -> None:
    """Guards against a second copy of the weights in applications whose prompts take every layer."""
    with load(bundle) as engine:
        engine.generate([[5, 6, 7], [8, 9]], PARAMS)
        assert not batched_forms(engine) & set(engine.backend.sessions)
        run(engine)
        assert batched_forms(engine) <= set(engine.backend.sessions)


def test_threads_load_them_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against concurrent requests that load several copies of the weights or see a partial set of graphs."""
    with load(bundle) as engine:
        opened, original = list[str](), engine.backend._load
        monkeypatch.setattr(engine.backend, "_load", lambda name: (opened.append(name), original(name))[1])
        results: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: results.append(run(engine))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(opened) == sorted(batched_forms(engine))
        assert len(results) == 4 and all(np.array_equal(results[0], other) for other in results)


def test_a_launch_of_theirs_counts_as_one_of_the_segment(bundle: Path) -> None:
    """Guards against wrong launch counts, by which tests prove that segments are skipped."""
    with load(bundle) as engine:
        engine.backend.launches.clear()
        run(engine)
        assert engine.backend.launches == {segment.name: 1 for segment in engine.manifest.segments}


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
    with load(bundle_copy) as engine:
        engine.generate([5, 6], PARAMS)  # which does not use it
        with pytest.raises(BundleError, match=f"{words}.*export the bundle again"):
            run(engine)
        with pytest.raises(BundleError, match="export the bundle again"):  # the next request fails in the same way
            run(engine)
