"""Captures: equality with the unmodified model, resuming after interruptions, and errors."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tide_calibrate.capture.forward_pass as capture_module
import torch
from export.architectures import DEEPSEEK_V4, FEW_LAYERS, LAYERS, MAX_POSITIONS, VOCAB, random_model, tiny_model
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.forward_pass import ForwardPass
from tide_calibrate.capture.store import Capture, open_capture, states
from tide_calibrate.text.documents import Windows
from tide_runtime.errors import CalibrationError, OutputError, ParamsError

from tide_export.sources.loaded_model import LoadedModel

CANDIDATES = (1, 2, LAYERS - 1, LAYERS)
SPLIT = np.array([0, 1, 2], np.int8)


def loaded(name: str = "llama", dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> LoadedModel:
    return LoadedModel(tiny_model(name, dtype, layers=layers), None, name)


def ragged(count: int = 11, seed: int = 0) -> Windows:
    """Windows of 16 to 24 tokens from three documents."""
    random = np.random.default_rng(seed)
    lengths = random.integers(16, 25, count).astype(np.int32)
    lengths[::3] = 24
    tokens = random.integers(3, VOCAB, (count, 24)).astype(np.int32)
    tokens[np.arange(24) >= lengths[:, None]] = 0
    return Windows(tokens, lengths, (np.arange(count) * 3 // count).astype(np.int32))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def watch_batches(monkeypatch: pytest.MonkeyPatch, interrupt_at: int = 0) -> list[int]:
    """Counts batches; KeyboardInterrupt in the logits of batch number ``interrupt_at``, whose states are already written."""
    original, batches = capture_module.sliced_logits, list[int]()

    def watched(*args: object) -> Iterator[object]:
        batches.append(1)
        for item in original(*args):
            if len(batches) == interrupt_at:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(capture_module, "sliced_logits", watched)
    return batches


# --- equality with the model


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "opt", "falcon", "cohere", "granite", "qwen3_moe", "mistral"])
def test_equals_the_model_on_each_window_alone(name: str, tmp_path: Path) -> None:
    """Padding, batching and slicing of logits must not change the training data of heads and routers, in any model family."""
    model, windows, five_positions = loaded(name), ragged(), 5 * 4 * 4 * VOCAB
    split = np.array([2, 0, 1], np.int8)  # a window of another document could leak training text into the test split
    made = capture(model, windows, split, CANDIDATES, tmp_path, batch_size=4, top_k=5, logit_bytes=five_positions)
    assert (made.tokens == windows.tokens).all() and (made.lengths == windows.lengths).all()
    assert (made.document == windows.document).all() and (made.split == split[windows.document]).all()
    for row in range(len(windows.tokens)):
        length = windows.lengths[row]
        with torch.no_grad():
            output = model.model(torch.from_numpy(windows.tokens[row : row + 1, :length]).long(), output_hidden_states=True)
        for checkpoint in CANDIDATES[:-1]:
            expected = output.hidden_states[checkpoint][0].numpy()
            np.testing.assert_allclose(made.hidden[checkpoint][row, :length], expected, rtol=2e-3, atol=2e-3)
        logits = output.logits[0].float()
        top = logits.topk(5)
        np.testing.assert_allclose(made.top_logits[row, :length], top.values.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(made.logsumexp[row, :length], logits.logsumexp(-1).numpy(), rtol=1e-4, atol=1e-4)
        assert (made.top_ids[row, :length, 0] == logits.argmax(-1).numpy()).all()
    if name == "llama":  # the final state is the one before the final norm, which exit heads apply themselves
        with torch.no_grad():
            logits = model.model.lm_head(model.model.model.norm(states(made, LAYERS, [0])))
        np.testing.assert_allclose(logits.logsumexp(-1)[0], made.logsumexp[0], rtol=1e-3, atol=1e-2)


def test_padding_never_reaches_a_valid_position(tmp_path: Path) -> None:
    """Tokens beyond a window's length must not change the captured values, bit for bit, and positions beyond it must be zero."""
    windows = ragged()
    noise = np.random.default_rng(1).integers(3, VOCAB, windows.tokens.shape)
    beyond = np.arange(24) >= windows.lengths[:, None]
    noisy = Windows(np.where(beyond, noise, windows.tokens).astype(np.int32), windows.lengths, windows.document)
    model = loaded()
    clean, other = (capture(model, w, SPLIT, CANDIDATES, tmp_path / str(i), batch_size=4) for i, w in enumerate((windows, noisy)))
    assert beyond.any() and (noisy.tokens != windows.tokens).any()
    for checkpoint in CANDIDATES:
        assert (clean.hidden[checkpoint] == other.hidden[checkpoint]).all()
        assert not clean.hidden[checkpoint][beyond].any()
    for name in ("top_ids", "top_logits", "logsumexp"):
        assert (getattr(clean, name) == getattr(other, name)).all() and not getattr(clean, name)[beyond].any()


@pytest.mark.parametrize(("hidden_dtype", "precision"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_states_are_rounded_only_to_the_stored_type(hidden_dtype: str, precision: float, tmp_path: Path) -> None:
    """bfloat16 is stored as uint16; interpreting the bits as integers would give meaningless states."""
    model, windows = loaded(), ragged()
    made = capture(model, windows, SPLIT, [2], tmp_path / "fp32", batch_size=1, hidden_dtype=hidden_dtype)
    with torch.no_grad():
        ids = torch.from_numpy(windows.tokens[[3, 0]]).long()
        expected = model.model(ids, output_hidden_states=True).hidden_states[2]
    read = states(made, 2, [3, 0])
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, expected, rtol=precision, atol=1e-6)
    low = capture(loaded(dtype=getattr(torch, hidden_dtype)), windows, SPLIT, CANDIDATES, tmp_path / "low")
    assert np.isfinite(low.logsumexp).all() and low.logsumexp[0, 0] > 0  # an 8B model in fp32 does not fit every machine


def test_no_file_stays_mapped_between_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages count as memory: kept mappings would let memory grow to the size of the capture."""
    original, mapped = capture_module.sliced_logits, []

    def watched(*args: object) -> object:
        mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())
        return original(*args)

    monkeypatch.setattr(capture_module, "sliced_logits", watched)
    capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, batch_size=4)
    assert mapped == [False] * 3


# --- interrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    capture(loaded(), ragged(), SPLIT, CANDIDATES, directory, batch_size=2)
    return files(directory)


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_interrupted_and_resumed_gives_the_same_bytes(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, bytes]
) -> None:
    """Ctrl-C must not lose the finished batches, which may have taken an hour."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        watch_batches(patched, batch)
        capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, batch_size=2)
    with pytest.raises(CalibrationError, match=rf"stopped after {batch - 1} of 6 batches; run tide-calibrate again"):
        open_capture(tmp_path)
    forwards = watch_batches(monkeypatch)
    capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, batch_size=2)
    assert len(forwards) == 6 - (batch - 1)  # finished batches do not run again
    assert files(tmp_path) == uninterrupted


def test_resumes_after_being_killed_in_the_middle_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, bytes]
) -> None:
    """SIGKILL can leave batches that are not recorded as done, a partly written batch or file, and a partly written progress
    file."""
    (tmp_path / "hidden_01.npy").write_bytes(b"\x93NUMPY")  # killed while files were created
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        watch_batches(patched, 3)
        capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, batch_size=2)
    rows = np.argsort(-ragged().lengths, kind="stable")[4:6]  # windows of batch 3
    for name, lengths in (("hidden_02", [24, 10]), ("top_ids", [24, 0])):
        torn = np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="r+")
        for row, length in zip(rows, lengths, strict=True):
            torn[row, : min(length, ragged().lengths[row])] = 99
        torn.flush()
    (tmp_path / "progress.json").write_text('{"done": 1, "batches": 6}')
    (tmp_path / "progress.json.part").write_text('{"do')
    capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, batch_size=2)
    assert files(tmp_path) == uninterrupted


def test_finished_capture_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training other heads must not need another pass over the text."""
    capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path)
    forwards = watch_batches(monkeypatch)

    def never() -> ForwardPass:
        raise AssertionError("an export can take minutes")

    again = capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path, make_pass=never)
    assert not forwards and again.hidden.keys() == set(CANDIDATES)


# --- refused

CHANGES: dict[str, Callable[[Path], Capture]] = {
    "model": lambda d: capture(LoadedModel(tiny_model("llama", seed=1), None, ""), ragged(), SPLIT, CANDIDATES, d),
    "model_dtype": lambda d: capture(loaded(dtype=torch.bfloat16), ragged(), SPLIT, CANDIDATES, d),
    "data": lambda d: capture(loaded(), ragged(seed=1), SPLIT, CANDIDATES, d),
    "candidates": lambda d: capture(loaded(), ragged(), SPLIT, [1], d),
    "hidden_dtype": lambda d: capture(loaded(), ragged(), SPLIT, CANDIDATES, d, hidden_dtype="bfloat16"),
    "top_k": lambda d: capture(loaded(), ragged(), SPLIT, CANDIDATES, d, top_k=3),
    "batch_size": lambda d: capture(loaded(), ragged(), SPLIT, CANDIDATES, d, batch_size=3),
}


def test_directory_of_another_capture_is_refused(tmp_path: Path) -> None:
    """A mix of two captures would give heads that fit neither model; overwriting one would lose hours of computation."""
    capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path)
    before = files(tmp_path)
    for change, run in CHANGES.items():
        with pytest.raises(CalibrationError, match=rf"holds another capture: .*\b{change} is .*another directory, or --force"):
            run(tmp_path)
    assert files(tmp_path) == before


def test_too_small_a_disk_is_refused_before_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a memory map on a full disk raises SIGBUS, possibly after an hour and without a message."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    forwards = watch_batches(monkeypatch)
    with pytest.raises(OutputError, match=r"takes .* GiB, but .* free; give a directory on another disk"):
        capture(loaded(), ragged(), SPLIT, CANDIDATES, tmp_path)
    assert not forwards


def _multiplied(name: str, factor: float) -> LoadedModel:
    model = loaded()
    with torch.no_grad():
        model.model.get_parameter(f"model.{name}.weight").mul_(factor)
    return model


def test_broken_states_name_their_layers(tmp_path: Path) -> None:
    """A broken weight must not give a head that never exits; some models have activations of 1e5, which float16 cannot hold."""
    inf, large = float("inf"), _multiplied("layers.1.mlp.down_proj", 1e8)
    for number, (model, candidates, message) in enumerate(
        [
            (_multiplied("layers.2.mlp.down_proj", inf), [1, 2, 4], r"after layer 4 is NaN .* \(layers 3 … 4 made it\)"),
            (_multiplied("norm", inf), [1, LAYERS], "logits are NaN or infinite"),
            (large, [1, 2], r"after layer 2 reaches .* more than float16 can hold.*bfloat16"),
        ]
    ):
        with pytest.raises(CalibrationError, match=message):
            capture(model, ragged(), SPLIT, candidates, tmp_path / str(number))
    made = capture(large, ragged(), SPLIT, [1, 2], tmp_path / "bfloat16", hidden_dtype="bfloat16")
    assert states(made, 2, [0]).abs().max() > 65504


ONE, LONG = np.zeros(1, np.int32), MAX_POSITIONS + 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"candidates": [LAYERS + 1]}, ParamsError, f"the model has {LAYERS} layers"),
        ({"candidates": [-1]}, ParamsError, "give layer counts"),
        ({"top_k": VOCAB + 1}, ParamsError, "the vocabulary's size"),
        ({"hidden_dtype": "int4"}, ParamsError, "give float16 or bfloat16"),
        ({"windows": Windows(np.ones((1, LONG), np.int32), ONE + LONG, ONE)}, ParamsError, f"at most {MAX_POSITIONS}"),
        (
            {"windows": Windows(np.full((1, 20), VOCAB, np.int32), ONE + 20, ONE)},
            CalibrationError,
            "the tokenizer belongs to another model",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(options: dict, error: type[Exception], message: str, tmp_path: Path) -> None:
    """Too long windows and unknown token ids would otherwise cause an index error inside the model."""
    arguments = {"windows": ragged(), "candidates": CANDIDATES, **options}
    with pytest.raises(error, match=message):
        capture(loaded(), split=SPLIT, directory=tmp_path / "never", **arguments)
    assert "windows" in options or not (tmp_path / "never").exists()


def test_several_residual_streams_are_refused(tmp_path: Path) -> None:
    """Exits would be trained on a part of a token's state, or the calibration end in an error of NumPy."""
    model = LoadedModel(random_model(DEEPSEEK_V4), None, "streams")
    with pytest.raises(CalibrationError, match="3 residual streams of a token"):
        capture(model, ragged(), SPLIT, [1, FEW_LAYERS], tmp_path)


def test_missing_and_damaged_captures_are_refused(tmp_path: Path) -> None:
    """Missing and damaged files must raise a CalibrationError with a message."""
    with pytest.raises(CalibrationError, match="holds no capture"):
        open_capture(tmp_path)
    capture(loaded(), ragged(), SPLIT, [1], tmp_path)
    (tmp_path / "hidden_01.npy").write_bytes((tmp_path / "hidden_01.npy").read_bytes()[:200])
    with pytest.raises(CalibrationError, match=r"cannot read .*hidden_01\.npy"):
        open_capture(tmp_path)
    for text in ("{", json.dumps({"candidates": [1]})):
        (tmp_path / "capture.json").write_text(text)
        with pytest.raises(CalibrationError, match=r"capture\.json is broken"):
            open_capture(tmp_path)
