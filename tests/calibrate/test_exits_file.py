"""exits.safetensors: round trip, reproducible bytes, and errors for damaged files."""

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


def test_written_exits_are_read_back(written: Path, heads: dict[int, ExitHead], tmp_path: Path) -> None:
    """The exporter builds graphs from these arrays and relies on their names, shapes and values. The model's own weights are not
    written, and equal weights give equal bytes."""
    assert {name.split(".")[0] for name in load_file(written)} == {"translator", "router"}
    again = tmp_path / "again.safetensors"
    write_exits(again, dict(reversed(heads.items())), {3: MlpRouter(64), 1: MlpRouter(64)})
    assert again.read_bytes() == written.read_bytes()
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


DAMAGES = (
    ("translator.1.up", None, "translator.1 needs down, up"),
    ("router.3.up_bias", None, "router.3 needs"),
    ("router.1.up", np.zeros(7, np.float32), r"router.1.up has shape \[7\], expected \[128\]"),
    ("translator.1.up", np.zeros((64, 3), np.float32), "translator.1.up has shape"),
    ("router.1.up", np.full(128, np.nan, np.float32), "finite float32"),
    ("router.1.up", np.zeros(128, np.float64), "finite float32"),
    ("rooter.1.up", np.zeros(1, np.float32), "rooter.1.up"),
    ("block.1.0.up", np.zeros(1, np.float32), "block.1.0.up"),
    ("router.x.up", np.zeros(1, np.float32), "router.x.up"),
)


def test_damaged_and_missing_files_are_refused(written: Path, tmp_path: Path, heads: dict[int, ExitHead]) -> None:
    """A wrong array would otherwise only show at run time, as bad text; the error for an incomplete copy must name a remedy."""
    tensors = load_file(written)
    for changed, value, message in DAMAGES:
        save_file({name: array for name, array in (tensors | {changed: value}).items() if array is not None}, written)
        with pytest.raises(CalibrationError, match=message):
            read_exits(written)
    written.write_bytes(written.read_bytes()[:100])
    for path in (written, tmp_path / "nothing.safetensors"):
        with pytest.raises(CalibrationError, match="run tide-calibrate again"):
            read_exits(path)
    with pytest.raises(OutputError, match="cannot write"):
        write_exits(tmp_path / "no" / "exits.safetensors", heads, {})
