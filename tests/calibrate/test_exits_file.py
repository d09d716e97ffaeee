"""exits.safetensors: round trip, reproducible bytes, and errors for damaged files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from export.architectures import tiny_model
from safetensors.numpy import load_file, save_file
from tide_calibrate.exit_heads import ExitHead, make_head
from tide_calibrate.exit_training import write_exits
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import MlpRouter
from tide_runtime.errors import CalibrationError, OutputError

from tide_export.calibration.exits_file import read_exits


@pytest.fixture(scope="module")
def heads() -> dict[int, ExitHead]:
    model = FrozenModel(tiny_model("llama"))
    return {1: make_head("tail:1", model, 1), 3: make_head("identity", model, 3)}


@pytest.fixture
def written(tmp_path: Path, heads: dict[int, ExitHead]) -> Path:
    path = tmp_path / "exits.safetensors"
    write_exits(path, heads, {1: MlpRouter(64), 3: MlpRouter(64)})
    return path


def test_written_exits_are_read_back(written: Path, heads: dict[int, ExitHead]) -> None:
    """The exporter builds graphs from these arrays and relies on their names, shapes and values."""
    weights = read_exits(written)
    assert set(weights.translators) == {1} and set(weights.routers) == {1, 3}
    assert np.array_equal(weights.translators[1]["down"], heads[1].trained()[0].detach().numpy())
    assert weights.translators[1]["up"].shape == (64, 64)
    assert {name: array.shape for name, array in weights.routers[3].items()} == {
        "down": (128, 64),
        "down_bias": (128,),
        "up": (128,),
        "up_bias": (1,),
    }


def test_the_frozen_model_is_not_in_the_file(written: Path) -> None:
    """The model's own weights must not be written: a calibration of an 8B model has a few megabytes."""
    parts = {name.split(".")[0] for name in load_file(written)}
    assert parts == {"translator", "router"}
    assert not any("embed" in name or "lm_head" in name for name in load_file(written))


def test_equal_weights_give_equal_bytes(written: Path, tmp_path: Path, heads: dict[int, ExitHead]) -> None:
    """A calibration must be reproducible, independent of the order of its exits."""
    again = tmp_path / "again.safetensors"
    write_exits(again, dict(reversed(heads.items())), {3: MlpRouter(64), 1: MlpRouter(64)})
    assert again.read_bytes() == written.read_bytes()


def _without(tensors: dict, name: str) -> dict:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: _without(t, "translator.1.up"), "translator.1 needs down, up"),
        (lambda t: _without(t, "router.3.up_bias"), "router.3 needs"),
        (lambda t: t | {"router.1.up": np.zeros(7, np.float32)}, r"router.1.up has shape \[7\], expected \[128\]"),
        (lambda t: t | {"translator.1.up": np.zeros((64, 3), np.float32)}, "translator.1.up has shape"),
        (lambda t: t | {"router.1.up": np.full(128, np.nan, np.float32)}, "finite float32"),
        (lambda t: t | {"router.1.up": np.zeros(128, np.float64)}, "finite float32"),
        (lambda t: t | {"rooter.1.up": np.zeros(1, np.float32)}, "rooter.1.up"),
        (lambda t: t | {"block.1.0.up": np.zeros(1, np.float32)}, "block.1.0.up"),
        (lambda t: t | {"router.x.up": np.zeros(1, np.float32)}, "router.x.up"),
    ],
)
def test_damaged_files_are_refused(written: Path, damage: Callable[[dict], dict], message: str) -> None:
    """A wrong array would otherwise only show at run time, as bad text."""
    tensors = load_file(written)
    save_file(damage(tensors), written)
    with pytest.raises(CalibrationError, match=message):
        read_exits(written)


def test_missing_and_truncated_files_are_refused(written: Path, tmp_path: Path) -> None:
    """The error for an incomplete copy must contain a remedy."""
    written.write_bytes(written.read_bytes()[:100])
    for path in (written, tmp_path / "nothing.safetensors"):
        with pytest.raises(CalibrationError, match="run tide-calibrate again"):
            read_exits(path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, heads: dict[int, ExitHead]) -> None:
    """After minutes of calibration, an unwritable path must give an error with a message."""
    with pytest.raises(OutputError, match="cannot write"):
        write_exits(tmp_path / "no" / "exits.safetensors", heads, {})
