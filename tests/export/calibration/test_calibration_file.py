"""calibration.json: what was written is what the exporter reads, and anything else is refused with the fix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrate.synthetic_calibration import synthetic_file
from tide_runtime.errors import CalibrationError

from tide_export.calibration.calibration_file import CALIBRATION_NAME, EXITS_NAME, read_calibration


@pytest.fixture
def written(tmp_path: Path) -> Path:
    synthetic_file().write(tmp_path)
    (tmp_path / EXITS_NAME).touch()
    return tmp_path


def test_the_exporter_reads_what_was_written(written: Path) -> None:
    """Every field comes back equal and of its own type, or a bundle would carry another calibration than the report shows."""
    assert read_calibration(written) == synthetic_file()


def test_a_file_of_an_earlier_release_is_about_the_model_itself(written: Path) -> None:
    """Certificates from before references would no longer load."""
    path = written / CALIBRATION_NAME
    raw = json.loads(path.read_text(encoding="utf-8"))
    for name in ("reference", "reference_sha256", "full_disagreement"):
        del raw["calibration"]["certificate"][name]
    path.write_text(json.dumps(raw), encoding="utf-8")
    certificate = read_calibration(written).calibration.certificate
    assert certificate is not None and certificate == synthetic_file().calibration.certificate
    assert certificate.compared_with == "the full model"


def test_another_models_calibration_is_refused(written: Path) -> None:
    """Exits trained for other weights guess at random, silently."""
    read = read_calibration(written)
    read.check_model("cd" * 32, "tiny")
    with pytest.raises(CalibrationError, match=r"made for tiny & <mighty>.* not for other .*tide-calibrate other"):
        read.check_model("00" * 32, "other")


def test_a_folder_without_calibration_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no calibration\.json; make one with tide-calibrate"):
        read_calibration(tmp_path)


def test_missing_weights_of_the_exits_are_noticed(written: Path) -> None:
    """A calibration.json copied alone would fail only in the middle of an export."""
    (written / EXITS_NAME).unlink()
    with pytest.raises(CalibrationError, match=r"lacks exits\.safetensors"):
        read_calibration(written)


def _set(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        at: Any = raw
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema", value=99), "schema 99, this version reads schema 1"),
        (lambda raw: raw.pop("heads"), "'heads' is missing"),
        (lambda raw: raw["calibration"].pop("costs"), "'costs' is missing"),
        (_set("surprise", value=1), "surprise"),
        (_set("calibration", "exits", 0, "head_kind", value="x"), "head_kind"),
        (_set("calibration", "exits", 0, "exit_threshold", value=1.5), "exit_threshold is 1.5, expected 0 … 1"),
        (_set("calibration", "exits", 0, "exact_threshold", value="high"), "not a calibration"),
        (_set("calibration", "exits", 0, "checkpoint", value=7), r"after layers \[7, 5\], expected rising"),
        (_set("calibration", "exits", 1, "checkpoint", value=8), "from 1 to 7"),
        (_set("calibration", "recommended", value="fast"), "recommended is 'fast'"),
        (_set("calibration", "draft_limit", value=-1), "draft_limit is -1"),
        (_set("calibration", value=[]), "not a calibration"),
    ],
)
def test_a_broken_file_is_refused_by_name(written: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    """A hand-edited or truncated file must not become wrong thresholds in a bundle."""
    path = written / CALIBRATION_NAME
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(CalibrationError, match=message):
        read_calibration(written)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(written: Path, text: str) -> None:
    (written / CALIBRATION_NAME).write_text(text)
    with pytest.raises(CalibrationError, match="calibrate the model again"):
        read_calibration(written)
