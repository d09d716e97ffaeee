"""Synthetic traces and a synthetic calibration file, whose exits agree more often the deeper they are."""

import numpy as np
from tide_calibrate.traces.trace import ExitTrace, SplitTrace, agreement_by_depth
from tide_runtime.bundle.calibration import CalibrationInfo, CertificateInfo, CostTable, ExitInfo, StepCost

from tide_export.calibration.calibration_file import CalibrationFile, DataInfo

LAYERS = 8
HEADS = ("identity", "tail:1")
CHECKPOINTS = (2, 4, 5)


def synthetic_trace(seed: int = 0, tokens: int = 600) -> SplitTrace:
    """A trace with calibrated scores: an exit agrees with the probability that its router predicts. Windows have 30 tokens."""
    random = np.random.default_rng(seed)
    ease = random.random(tokens)
    full = (-np.log(0.1 + 0.8 * ease)).astype(np.float32)
    full[29::30] = np.nan
    exits = {}
    for checkpoint in CHECKPOINTS:
        for i, head in enumerate(HEADS):
            chance = np.clip(ease ** (1.5 - checkpoint / LAYERS) * (0.8 + 0.1 * i), 0, 1).astype(np.float32)
            scores = {"mlp": chance, "max_probability": chance, "entropy": -chance}
            agrees = random.random(tokens) < chance
            exits[checkpoint, head] = ExitTrace(checkpoint, head, agrees, full + (1 - chance), scores)
    index = np.arange(tokens, dtype=np.int32)
    return SplitTrace(index // 30, index // 150, full, exits, LAYERS)


def synthetic_exits() -> list[ExitInfo]:
    return [
        ExitInfo(2, "tail:1", "max_probability", exact_threshold=0.5, exit_threshold=0.95),
        ExitInfo(5, "tail:1", "mlp+max_probability", exact_threshold=0.4, exit_threshold=0.9, mlp_threshold=0.3),
    ]


def synthetic_file(exits: list[ExitInfo] | None = None) -> CalibrationFile:
    exits = synthetic_exits() if exits is None else exits
    certificate = CertificateInfo(0.01, 0.95, "Learn then Test", "document", 600, 4, 0.006, "ab" * 32, "2026-11-21")
    costs = CostTable("cpu", "a <machine>", 3.0, [StepCost(1, 1, 0.02, 0.1, 0.3, 0.01, 0.05)])
    splits = ("train", "threshold", "test")
    return CalibrationFile(
        model="tiny & <mighty>",
        model_fingerprint="cd" * 32,
        num_layers=LAYERS,
        calibration=CalibrationInfo(
            exits,
            draft_limit=4,
            recommended="exact" if exits else "full",
            predicted={"full": 0.99, "exact": 1.31, "exit": 1.22},
            certificate=certificate if exits else None,
            costs=costs,
        ),
        refusal="" if exits else "the layers never agree",
        data=DataInfo("texts", 0, dict.fromkeys(splits, 4), dict.fromkeys(splits, 600), dict.fromkeys(splits, "ef" * 32)),
        heads=agreement_by_depth(synthetic_trace(), synthetic_trace(1)),
        config={"heads": "identity,tail:1", "seed": 0},
        tools={"tide-llm": "0.1.0"},
        date="2026-11-21T00:00:00+00:00",
    )
