"""The bundles that the GPU kit carries, made where there is time: python -m benchmarks.gpu.kit_bundles. See docs/gpu-kit.md.

The demo model with calibrated exits, in fp32, fp16 and int4; and, without their weights, bundles in the shape of a 1B model with
random ones, whose exits are forced: their routers are random too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from zlib import crc32

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from tide_calibrate.routers.mlp import MlpRouter
from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, ExitInfo, StepCost
from transformers import AutoModelForCausalLM

from benchmarks.gpu.carried_bundle import pack
from benchmarks.gpu.model_shapes import MAX_SEQ_LEN, SHAPES, TORCH_DTYPES, ModelShape, dtype_of
from benchmarks.models.calibrated_bundles import calibrated_bundles
from tide_export.calibration.calibration_file import CalibrationFile, DataInfo
from tide_export.calibration.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.fake_parameters import without_parameters
from tide_export.load import LoadedModel, fingerprint, quantized
from tide_export.progress import ExportProgress
from tide_export.quantization.quantized_weight import QuantizedWeight

TO, CACHE = Path("build") / "kit-bundles", Path("build") / "bench-cache"
_EXITS = (4, 8, 12)  # layers of the 1B model before an exit
_RANK = 16
# Asking costs nothing, so that the host never rests from it: the device does not either.
_FREE = StepCost(rows=1, seq=1, launch_ms=0.0, layer_ms=1.0, head_ms=0.0, exit_ms=0.0, host_ms=0.0)
COSTS = CostTable(target="stub", machine="none", unsplit_ms=1.0, steps=[_FREE])


class RandomParameters:
    """A `ParameterSource` of random numbers, seeded by name; norms are ones."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def value(self, name: str) -> torch.Tensor:
        shape, dtype = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        return torch.empty(shape).normal_(std=0.02, generator=generator).to(dtype)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self.value(name)[first : first + count]

    def quantized(self, name: str) -> QuantizedWeight | None:
        return None


def random_model(shape: ModelShape, dtype: str, file: Path) -> LoadedModel:
    """Without memory for its parameters. ``file``: is written, and stands for the checkpoint that a calibration is of."""
    save_file({"seed": torch.zeros(1)}, file)
    compute = TORCH_DTYPES[dtype_of(dtype)]
    model = without_parameters(lambda: AutoModelForCausalLM.from_config(shape.config(), dtype=compute))
    return quantized(LoadedModel(model, None, shape.name, None, (file,), streamed=RandomParameters(model)), dtype, "rtn")


def random_exits(loaded: LoadedModel) -> ExitCalibration:
    """Exits with MLP routers and linear heads, whose thresholds a caller sets: 0 takes the first, 1 none."""
    hidden, random = loaded.model.config.hidden_size, np.random.default_rng(0)
    infos = [ExitInfo(at, "linear", "mlp", exact_threshold=0.5, exit_threshold=0.5) for at in _EXITS]
    tensors: dict[str, np.ndarray] = {}
    for at in _EXITS:
        for name, parameter in MlpRouter(hidden).named_parameters():  # every score is ½ at first: between the thresholds
            tensors[f"router.{at}.{name}"] = parameter.detach().numpy()
        for name, size in (("down", (_RANK, hidden)), ("up", (hidden, _RANK))):
            tensors[f"translator.{at}.{name}"] = (0.1 * random.normal(size=size) * size[1] ** -0.5).astype(np.float32)
    file = CalibrationFile(
        model=loaded.source,
        model_fingerprint=fingerprint(loaded),
        num_layers=loaded.num_layers,
        calibration=CalibrationInfo(infos, draft_limit=4, recommended="exit", costs=COSTS),
        refusal="random",
        data=DataInfo("none", 0, {}, {}, {}),
        heads=[],
        config={},
        tools={},
        date="",
    )
    return ExitCalibration(Path(), file, tensors)


def _exits_for(loaded: LoadedModel, folder: Path) -> ExitCalibration:
    """The calibration in ``folder``, of the dense model, for another form of its weights: loops are compared with loops."""
    calibration = read_exit_calibration(folder)
    return replace(calibration, file=replace(calibration.file, model_fingerprint=fingerprint(loaded)))


def _config(dtype: str, target: str) -> ExportConfig:
    return ExportConfig(dtype_of(dtype), max_seq_len=MAX_SEQ_LEN, targets=(target,), verify=False)


def main(
    to: Annotated[Path, typer.Option(help="The folder to carry; replaced.")] = TO,
    calibration: Annotated[Path | None, typer.Option(help="Of the demo model; made where there is none.")] = None,
    target: Annotated[str, typer.Option(help="Of the bundles.")] = "torch",
) -> None:
    """Export, and pack what travels."""
    calibration = calibration or calibrated_bundles("layerskip", CACHE)[5].parent / "calibration_5"
    for folder in to.glob("*_*"):
        if folder.is_dir():
            shutil.rmtree(folder)
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        base = Path(scratch) / "demo_fp32"
        for dtype in ("fp32", "fp16", "int4"):
            bundle = Path(scratch) / f"demo_{dtype}"
            bundle.mkdir()
            loaded = SHAPES["demo"].load(dtype)
            write_bundle(loaded, bundle, _config(dtype, target), ExportProgress(quiet=True), _exits_for(loaded, calibration))
            _say(pack(bundle, to / bundle.name, base=base if dtype == "fp16" else None), bundle)
        for dtype in SHAPES["1b"].dtypes:
            bundle = Path(scratch) / f"1b_{dtype}"
            bundle.mkdir()
            loaded = random_model(SHAPES["1b"], dtype, Path(scratch) / "1b.safetensors")
            write_bundle(loaded, bundle, _config(dtype, target), ExportProgress(quiet=True), random_exits(loaded))
            _say(pack(bundle, to / bundle.name, is_random=True), bundle)
            shutil.rmtree(bundle)
    print(f"RESULT kit_bundles_mib={sum(p.stat().st_size for p in to.rglob('*') if p.is_file()) / 2**20:.4g}")


def _say(count: int, bundle: Path) -> None:
    print(f"{bundle.name}: {count / 2**20:.2f} MiB", flush=True)


if __name__ == "__main__":
    typer.run(main)
