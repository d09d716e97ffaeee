"""Compare the compiled exits with the modules that were calibrated, on the hidden states of the compiled segments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tide_runtime import ThreadOptions
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import Backend
from tide_runtime.backends.graph_contract import hidden_states
from tide_runtime.bundle.bundle import Bundle
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import HEAD, Manifest, exit_graph, score_graph
from tide_runtime.errors import VerificationError
from tide_runtime.text.tokenizer import Tokenizer

from tide_export.graphs.exit_modules import ExitModules, ExitTensors
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


@torch.no_grad()
def exit_reference(
    info: ExitInfo, tensors: ExitTensors, hidden: NDArray[np.generic], logits: NDArray[np.generic] | None = None
) -> dict[str, NDArray[np.float64]]:
    """What the modules of an exit compute in float64 from ``hidden`` [T, H]; with ``logits`` [T, V], its router's score."""
    modules = ExitModules.of(info, tensors, hidden.shape[-1])
    wide = torch.from_numpy(hidden.astype(np.float64))
    outputs = {}
    if logits is not None:
        given = torch.from_numpy(np.asarray(logits).astype(np.float64))
        return {"score": modules.router.double().scores(wide, given, given.logsumexp(-1)).numpy()}
    if info.has_mlp:
        outputs["score"] = modules.router.double().scores(wide, None, None).numpy()
    if modules.translator is not None:
        outputs["hidden_out"] = modules.translator.double()(wide).numpy()
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
        reads, writes = hidden_states(manifest, exit_graph(info))
        states = step.hidden[reads].copy()

        def compare(graph: str, reference: dict[str, NDArray[np.float64]], writes: int = writes) -> None:
            step.run(graph)
            outputs = {"score": (step.score, 1.0), "hidden_out": (step.hidden[writes], float(np.abs(step.hidden[writes]).max()))}
            for name, expected in reference.items():
                array, scale = outputs[name]
                found[graph, name] = float(np.abs(np.asarray(array) - expected).max()) / scale

        if info.graph_outputs():
            compare(exit_graph(info), exit_reference(info, tensors, states))
        if info.scores_logits:
            if info.head == "identity":
                step.hidden[-1][:] = states
            step.run(HEAD)
            compare(score_graph(info), exit_reference(info, tensors, states, step.logits[: len(states)]))
    return found
