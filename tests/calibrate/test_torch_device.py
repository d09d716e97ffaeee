"""A calibration on another device than the processor: nothing is mixed with host memory, and the results are the same."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from calibrate.pretend_gpu import DEVICE, PretendGpu
from export.architectures import LAYERS, tiny_model
from tide_calibrate.calibrate import calibrate
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.draft_head import train as draft_training
from tide_calibrate.draft_head.replies import Replies, write_replies
from tide_calibrate.draft_head.train import train_draft_head
from tide_calibrate.exit_heads import make_head
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary
from tide_calibrate.exit_heads.train import HeadTraining, train_head
from tide_calibrate.exit_training import TrainedExit, write_exits
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers.train import RouterTraining, train_router
from tide_calibrate.text.documents import SplitText, Windows
from tide_calibrate.torch_device import checked_device, model_on
from tide_calibrate.traces.continuations import continue_prompts
from tide_calibrate.traces.trace import SplitTrace
from tide_calibrate.train import trace_exits
from tide_runtime.errors import ParamsError, TargetError
from transformers import PreTrainedModel

from tide_export.sources.loaded_model import LoadedModel

TOKENS, CHECKPOINT, MIDDLE = 16, 1, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def captured(model: PreTrainedModel) -> Capture:
    tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (24, TOKENS))
    split = np.repeat([0, 1, 2], [16, 4, 4])
    return capture_of(model, tokens, [CHECKPOINT, MIDDLE, LAYERS - 1, LAYERS], np.full(24, TOKENS), split)


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random numbers of the device are the processor's, and jobs run in this thread, where the device is pretended."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator("cpu"))
    monkeypatch.setattr("tide_calibrate.parallel.ThreadPoolExecutor", _InThisThread)
    yield


class _InThisThread:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        done: Future = Future()
        done.set_result(job(*args))
        return done

    def shutdown(self, cancel_futures: bool) -> None: ...


def _on(model: PreTrainedModel, device: torch.device) -> FrozenModel:
    moved = copy.deepcopy(model)
    moved.to(device)  # type: ignore[arg-type]
    return FrozenModel(moved, LAYERS)


def _learned(model: PreTrainedModel, captured: Capture, device: torch.device, kind: str) -> tuple[dict, SplitTrace]:
    """Weights of a head and its router, and their trace, as written to files."""
    frozen = _on(model, device)
    vocabulary = SampledVocabulary(torch.arange(0, 40, device=device), model.config.vocab_size, random=8)
    head = make_head(kind, frozen, CHECKPOINT, 8)
    training = HeadTraining(steps=4, check_every=2, held_out_windows=2)
    train_head(head, captured, training, vocabulary=vocabulary)
    router = train_router(head, captured, RouterTraining(windows=4, held_out_windows=2, epochs=1), vocabulary)
    exits = {(CHECKPOINT, kind): TrainedExit(head, router)}
    weights = {
        name: value.detach().cpu().numpy() for name, value in [*head.translator.named_parameters(), *router.named_parameters()]
    }
    return weights, trace_exits(frozen, captured, "test", exits)


@pytest.mark.parametrize("kind", ["linear", "tail:1"])
def test_heads_routers_and_traces_are_the_processors(
    kind: str, model: PreTrainedModel, captured: Capture, pretend_gpu: None
) -> None:
    """A tensor that is made in host memory ends a calibration on a GPU after minutes, where no machine without one shows it."""
    weights, trace = _learned(model, captured, CPU, kind)
    with PretendGpu():
        ours, own_trace = _learned(model, captured, DEVICE, kind)
    for name, value in weights.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-4)
    one, other = trace.exits[CHECKPOINT, kind], own_trace.exits[CHECKPOINT, kind]
    assert (one.agrees == other.agrees).mean() > 0.95
    np.testing.assert_allclose(one.nll, other.nll, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(trace.full_nll, own_trace.full_nll, rtol=1e-4, atol=1e-4)


def _windows(model: PreTrainedModel) -> Windows:
    tokens = np.random.default_rng(1).integers(3, 60, (4, TOKENS)).astype(np.int32)
    return Windows(tokens, np.full(4, TOKENS, np.int32), np.arange(4, dtype=np.int32))


def test_captures_and_continuations_are_the_processors(model: PreTrainedModel, tmp_path: Path, pretend_gpu: None) -> None:
    """States would be read before the device has written them, or a batch be padded with a mask of host memory."""
    windows, split = _windows(model), np.array([0, 1, 1, 2], np.int8)
    windows.lengths[0] = TOKENS - 3  # needs a mask
    loaded = LoadedModel(model, None, "tiny")
    expected = capture(loaded, windows, split, [CHECKPOINT, LAYERS], tmp_path / "cpu")
    text, _ = continue_prompts(model, windows, split, 2, 4)
    moved = LoadedModel(copy.deepcopy(model), None, "tiny")
    with PretendGpu(), model_on(moved, DEVICE):
        found = capture(moved, windows, split, [CHECKPOINT, LAYERS], tmp_path / "pretend")
        own_text, _ = continue_prompts(moved.model, windows, split, 2, 4)
    assert moved.model.device == CPU  # where the exporter reads it
    np.testing.assert_array_equal(found.top_ids[..., 0], expected.top_ids[..., 0])
    np.testing.assert_allclose(found.hidden[LAYERS], expected.hidden[LAYERS], rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(own_text.tokens, text.tokens)


@pytest.mark.slow
def test_the_draft_head_learns_there(
    model: PreTrainedModel, captured: Capture, tmp_path: Path, pretend_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are sampled on the device, and the head's weights go into a file from there."""
    monkeypatch.setattr(draft_training, "STEPS", (3,))
    loaded = LoadedModel(copy.deepcopy(model), None, "tiny")
    with PretendGpu(), model_on(loaded, DEVICE):
        frozen = FrozenModel(loaded.model, LAYERS)
        text = SplitText([], np.zeros(4, np.int8), _windows(model))
        replies = write_replies(loaded, text, [MIDDLE, LAYERS], 4, seed=0)
        short = Replies(captured, np.zeros(len(captured.tokens), np.int64))
        trained = train_draft_head(frozen, captured, short, MIDDLE, seconds=0.1)
        write_exits(tmp_path / "exits.safetensors", {}, {}, trained.head)
    assert replies.capture.tokens.shape[0] == 4 and (tmp_path / "exits.safetensors").exists()


def test_mixing_with_host_memory_and_a_missing_gpu_are_refused(tmp_path: Path) -> None:
    """The tests above would pass whatever the code does; and a calibration would load a model for minutes before it fails."""
    with PretendGpu():
        there = torch.arange(3).to(DEVICE)
        with pytest.raises(RuntimeError, match="mixes tensors"):
            there + torch.arange(3)
        assert (there + 1).cpu().tolist() == [1, 2, 3] and int(there.sum()) == 3
    with pytest.raises(ParamsError, match="cuda:1 for the second"):
        CalibrationConfig(device="gpu")
    if torch.cuda.is_available():
        pytest.skip("needs a torch without a GPU")
    with pytest.raises(TargetError, match="sees 0 GPUs"):
        calibrate("nowhere", "nothing", tmp_path / "out", CalibrationConfig(device="cuda"))
    assert checked_device("cpu").type == "cpu" and not (tmp_path / "out").exists()
