"""A model's step costs: measured on this machine on a temporary bundle, or nominal ones where costs are not measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.errors import CalibrationError

from tide_calibrate.costs.fit import ROUTER_WIDTH
from tide_calibrate.costs.measure import load_costs, measuring_checkpoints
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_export.model.boundaries import decoder_layers
from tide_export.sources.loaded_model import LoadedModel

NOMINAL = "nominal"  # target of nominal costs
_EXTRA_TOKEN = 0.08  # additional time per further token in a launch, as a share of one token's time
_SIZES = (1, 2, 4, 8, 16)


def measure_model_costs(
    loaded: LoadedModel, dtype: str, directory: Path, target: str, bundle: TemporaryBundle | None = None
) -> CostTable:
    """Time the graphs of ``bundle``, or of a new export of ``loaded`` for ``target`` into ``directory``, which is deleted
    afterwards."""
    if bundle is not None:
        path = bundle.path()
        return measure_in_own_process(path, bundle.target, path.with_name("costs.json"))
    with TemporaryBundle(loaded, dtype, measuring_checkpoints(loaded.num_layers), directory, target=target) as own:
        return measure_model_costs(loaded, dtype, directory, target, own)


def measure_in_own_process(bundle: Path, target: str, file: Path) -> CostTable:
    """Measure the costs of ``bundle`` in a process configured like the commands: one thread pool for all graphs, and no torch.

    ONNX Runtime fixes the thread pool of a process before its first session, so the calibrating process cannot change its own.
    The table is written to ``file`` as well. Raises CalibrationError when the process fails.
    """
    failure = "the costs of steps could not be measured"
    advice = "give --costs none or a table"
    in_own_process("tide_calibrate.costs.measure", [str(bundle), target, str(file)], failure, advice)
    return load_costs(file)


def in_own_process(module: str, arguments: Sequence[str], failure: str, advice: str = "give --costs none") -> None:
    """Run ``module`` with ``arguments`` in a process of its own. Raises CalibrationError, ``failure`` with the last line of its
    errors and ``advice``, when it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CalibrationError(f"{failure} ({lines[-1]}); {advice}")


def nominal_costs(loaded: LoadedModel) -> CostTable:
    """Nominal costs in units of one layer for one token, in the table's ms fields; launches and host overhead are 0.

    Decoding is bound by the bandwidth of reading weights, so a layer and the head cost in proportion to their parameters. Further
    tokens in the same launch cost little: four tokens are taken to need 1.24 times as long as one.
    """
    model = loaded.model
    one_layer = sum(parameter.numel() for parameter in decoder_layers(model)[0].parameters())
    embeddings = model.get_output_embeddings()
    head = sum(parameter.numel() for parameter in embeddings.parameters()) / one_layer if embeddings is not None else 1.0
    exit_graph = 3 * ROUTER_WIDTH * model.config.get_text_config().hidden_size / one_layer  # a router and a translator
    steps = [StepCost(1, size, 0.0, _relative_cost(size), head * _relative_cost(size), exit_graph, 0.0) for size in _SIZES]
    return CostTable(NOMINAL, "none", loaded.num_layers + head, steps)


def _relative_cost(tokens: int) -> float:
    return 1 + _EXTRA_TOKEN * (tokens - 1)
