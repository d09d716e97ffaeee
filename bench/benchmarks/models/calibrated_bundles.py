"""Models as `tide-calibrate` and `tide-export` make them, kept between runs of benchmarks.

python -m benchmarks.models.calibrated_bundles smollm2       # or smollm2-int4, layerskip, stock, looped; prints the bundles
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tide_bench.build_cache import cached_folder, files_digest, run_in_process
from tide_bench.bundles import export_key
from tide_calibrate.config import CalibrationConfig

from benchmarks.models.gguf_files import smollm2_file, smollm2_identity
from benchmarks.models.model_folders import CACHE, DEMO_MODELS
from examples.demo_data import held_out_files, write_held_out

_ROOT = Path(__file__).resolve().parents[3]
PERCENTS = (1, 5)  # certified disagreement of policy exit
WINDOWS = CalibrationConfig.max_windows
SMOLLM2_WINDOWS = 390  # windows of 256 tokens: 100,000 tokens, the amount that `tide-calibrate --minutes` refers to


def demo_identity(model: str) -> str:
    """Changes when the weights of the demo model do."""
    return files_digest(sorted(p for p in (DEMO_MODELS / model).iterdir() if p.suffix in (".json", ".safetensors")))


@dataclass(frozen=True)
class Calibrated:
    """What is calibrated.

    Args:
        source: what ``tide-calibrate`` and ``tide-export`` read.
        identity: changes when the weights do.
        weights: their form, as ``--weights`` takes it.
        percents: certified disagreements.
        max_windows: windows of text used at most.
    """

    source: Path
    identity: str
    weights: str = "source"
    percents: Sequence[int] = PERCENTS
    max_windows: int = WINDOWS


def _calibrated(model: str) -> Calibrated:
    """A demo model, or SmolLM2 in fp32 or int4 (certified at the first percentage only: its bundles are large)."""
    if not model.startswith("smollm2"):
        return Calibrated(DEMO_MODELS / model, demo_identity(model))
    weights = model.partition("-")[2] or "fp32"
    return Calibrated(smollm2_file(), f"{smollm2_identity()} {weights}", weights, PERCENTS[:1], SMOLLM2_WINDOWS)


def calibrated_bundles(model: str, cache: Path) -> dict[int, Path]:
    """Bundles of ``model`` by the percentage of disagreement that its exits are certified at.

    Calibrated on the demo's own data (SmolLM2: 100,000 tokens) with default options: once, but for the certificates. Each
    bundle_P has its calibration beside it, in calibration_P. Made again when the weights, the data, the calibrator or the
    exporter change.
    """
    chosen = _calibrated(model)
    calibrator = [*sorted((_ROOT / "calibrate").rglob("*.py")), _ROOT / "runtime" / "tide_runtime" / "bundle" / "calibration.py"]
    data = sha256("\0".join(file.text for file in held_out_files()).encode()).hexdigest()
    key = "\n".join([export_key(chosen.identity), files_digest(calibrator), data])
    options = str(chosen.source), chosen.weights, chosen.percents, chosen.max_windows
    folder = cached_folder(cache / model / "calibrated", key, lambda f: run_in_process(_calibrate_and_export, *options, f))
    return {percent: folder / f"bundle_{percent}" for percent in chosen.percents}


def _calibrate_and_export(source: str, weights: str, percents: Sequence[int], max_windows: int, folder: Path) -> None:
    from tide_calibrate.calibrate import calibrate  # torch takes seconds to import

    from tide_export import export
    from tide_export.config import ExportConfig

    calibrations = {percent: folder / f"calibration_{percent}" for percent in percents}
    data = folder / "data"
    write_held_out(data)
    first, *others = percents
    config = CalibrationConfig(max_disagreement=first / 100, weights=weights, max_windows=max_windows)
    calibrate(source, str(data), calibrations[first], config, also={percent / 100: calibrations[percent] for percent in others})
    for percent, calibration in calibrations.items():
        options = ExportConfig(verify=False, calibration=str(calibration), weights=weights)
        export(source, folder / f"bundle_{percent}", options)


if __name__ == "__main__":
    print(*calibrated_bundles(sys.argv[1], CACHE).values(), sep="\n")
