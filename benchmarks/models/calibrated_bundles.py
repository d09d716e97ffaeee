"""The demo models as `tide-calibrate` and `tide-export` make them, kept between runs of benchmarks."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from tide_bench.build_cache import cached_folder, files_digest
from tide_bench.bundles import export_key
from tide_bench.in_process import run_in_process

from benchmarks.models.demo import DEMO_MODELS
from examples.demo_data import held_out_files, write_held_out

_ROOT = Path(__file__).resolve().parents[2]
PERCENTS = (1, 5)  # certified disagreement of policy exit


def demo_identity(model: str) -> str:
    """Changes when the weights of the demo model do."""
    return files_digest(sorted(p for p in (DEMO_MODELS / model).iterdir() if p.suffix in (".json", ".safetensors")))


def calibrated_bundles(model: str, cache: Path) -> dict[int, Path]:
    """Bundles of the demo model ``model`` whose exits are certified at 1% and at 5% disagreement, by percent.

    Calibrated on the demo's own data with default options: once, but for the certificates. Made again when the
    weights, the data, the calibrator or the exporter change.
    """
    calibrator = [*sorted((_ROOT / "calibrate").rglob("*.py")), _ROOT / "runtime" / "tide_runtime" / "bundle" / "calibration.py"]
    data = sha256("\0".join(file.text for file in held_out_files()).encode()).hexdigest()
    key = "\n".join([export_key(demo_identity(model)), files_digest(calibrator), data])
    folder = cached_folder(cache / model / "calibrated", key, lambda f: run_in_process(_calibrate_and_export, model, f))
    return {percent: folder / f"bundle_{percent}" for percent in PERCENTS}


def _calibrate_and_export(model: str, folder: Path) -> None:
    from tide_calibrate.calibrate import calibrate
    from tide_calibrate.config import CalibrationConfig

    from tide_export import export
    from tide_export.config import ExportConfig

    source, calibrations = str(DEMO_MODELS / model), {percent: folder / f"calibration_{percent}" for percent in PERCENTS}
    data = folder / "data"
    write_held_out(data)
    first, *others = PERCENTS
    also = {percent / 100: calibrations[percent] for percent in others}
    calibrate(source, str(data), calibrations[first], CalibrationConfig(max_disagreement=first / 100), also=also)
    for percent, calibration in calibrations.items():
        export(source, folder / f"bundle_{percent}", ExportConfig(verify=False, calibration=str(calibration)))
