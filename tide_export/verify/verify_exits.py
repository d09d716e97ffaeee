"""Compare the compiled exits with their formulas, on the hidden states of the compiled segments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tide_runtime import ThreadOptions
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import Backend
from tide_runtime.backends.graph_contract import hidden_states
from tide_runtime.bundle.bundle import Bundle
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest, exit_graph
from tide_runtime.errors import VerificationError
from tide_runtime.text.tokenizer import Tokenizer

from tide_export.graphs.exit_graphs import RMS_EPSILON, ExitTensors
from tide_export.verify.verify_bundle import prompts

# Allowed rounding error: exits compute in float32 and round the state once.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2}


@dataclass(frozen=True)
class ExitCheck:
    """``max_difference``: max |Δ| of an exit's output over all prompts; relative to the largest value for states."""

    graph: str
    output: str
    max_difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.max_difference <= self.tolerance  # False for NaN


def verify_exits(directory: Path, tensors: ExitTensors, target: str = "cpu") -> list[ExitCheck]:
    """Check every exit's graph of ``target``. Raises VerificationError naming graphs whose difference exceeds rounding."""
    bundle = Bundle.open(directory, verify=False)
    # Without an engine, which times passes when it is loaded: minutes for a model of a billion parameters and four loops.
    checks = _checks(bundle, load_backend(bundle, target, ThreadOptions()), tensors)
    failed = [check for check in checks if not check.passed]
    if failed:
        lines = "; ".join(f"{c.output} of {c.graph} by {c.max_difference:.1e} (allowed {c.tolerance:.1e})" for c in failed)
        raise VerificationError(
            f"the bundle's exits differ from what was calibrated: {lines}. Nothing was written. Please report the model's "
            "config; --no-verify writes the bundle all the same"
        )
    return checks


def exit_reference(info: ExitInfo, tensors: ExitTensors, hidden: NDArray[np.generic]) -> dict[str, NDArray[np.float64]]:
    """An exit's outputs by the formulas of `tide_export.graphs.exit_graphs`, in float64, from ``hidden`` [T, H]."""
    exact = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    wide = hidden.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + RMS_EPSILON)
    outputs = {}
    if "score" in info.graph_outputs():
        router = f"router.{info.checkpoint}"
        down = normed @ exact[f"{router}.down"].T + exact[f"{router}.down_bias"]
        outputs["score"] = _sigmoid((down * _sigmoid(down)) @ exact[f"{router}.up"] + exact[f"{router}.up_bias"])
    if "hidden_out" in info.graph_outputs():
        translator = f"translator.{info.checkpoint}"
        outputs["hidden_out"] = wide + normed @ exact[f"{translator}.down"].T @ exact[f"{translator}.up"].T
    return outputs


def _checks(bundle: Bundle, backend: Backend, tensors: ExitTensors) -> list[ExitCheck]:
    """One check per output of each exit's graph."""
    worst: dict[tuple[str, str], float] = {}
    info = bundle.manifest.tokenizer
    tokenizer = Tokenizer.from_file(bundle.path(info.file)) if info is not None else None
    for _, ids in prompts(bundle.manifest, tokenizer):
        for key, difference in _differences(bundle.manifest, backend, ids, tensors).items():
            worst[key] = float(np.maximum(worst.get(key, 0.0), difference))  # NaN stays
    return [ExitCheck(*key, value, TOLERANCE[bundle.manifest.dtype]) for key, value in sorted(worst.items())]


def _differences(manifest: Manifest, backend: Backend, ids: list[int], tensors: ExitTensors) -> dict[tuple[str, str], float]:
    """(graph, output) → max |Δ| over a prompt, absolute for a score, relative to the largest value for a state."""
    assert manifest.calibration is not None
    step = backend.context(1).step(0, [len(ids)])
    step.input_ids[: len(ids)] = ids  # on a device a step may have more, as padding
    step.place([0])
    for segment in manifest.segments:
        step.run(segment.name)
    found = {}
    for info in reversed(manifest.calibration.exits):  # deep first: an exit's output is no input of a shallower exit
        graph = exit_graph(info)
        if not info.graph_outputs():
            continue
        reads, writes = hidden_states(manifest, graph)
        expected = exit_reference(info, tensors, step.hidden[reads].copy())
        step.run(graph)
        outputs = {"score": (step.score, 1.0), "hidden_out": (step.hidden[writes], float(np.abs(step.hidden[writes]).max()))}
        for name, reference in expected.items():
            array, scale = outputs[name]
            found[graph, name] = float(np.abs(np.asarray(array) - reference).max()) / scale
    return found


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return (1 + np.tanh(x / 2)) / 2  # this form does not overflow
