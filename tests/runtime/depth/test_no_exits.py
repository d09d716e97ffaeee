"""A calibration that found no exit worth a cut: one chain of layers, on which `exact` still copies from the text."""

from dataclasses import replace

import pytest
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request, generate, output
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import CalibrationInfo
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.errors import ParamsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence

MODEL = TinyTransformer(0, (0.5, 0.0, 0.0), 7, 64)  # shallow enough to repeat itself
REQUESTS = [
    Request((1, 2, 3, 1, 2, 3, 1, 2), GenerationParams(max_new_tokens=40), 0),
    Request((5,), GenerationParams(max_new_tokens=30), 1),
]
MANIFEST = replace(tiny_manifest(MODEL, ()), calibration=CalibrationInfo([], 0, "exact", {"exact": 1.2}))


def rows_of(policy: str, draft: str = "all", capacity: int = 2) -> list[TokenSequence]:
    made = make_policy(policy, MANIFEST, DepthOptions(draft=draft))
    return generate(made, NumpyBackend(MANIFEST, MODEL), REQUESTS, capacity)


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("draft", ["all", "ngram", "router", "none"])
def test_exact_without_exits_is_full(draft: str, capacity: int) -> None:
    """The bundle of a model that no exit suits would crash, or say something else."""
    assert [output(row) for row in rows_of("exact", draft, capacity)] == [output(row) for row in rows_of("full")]


def test_the_recommended_policy_copies() -> None:
    """`auto` would take `full`, and the gain that the calibration predicts would not come."""
    assert make_policy("auto", MANIFEST, DepthOptions()).name == "exact"
    rows = rows_of("auto")
    assert sum(row.depth.accepted["ngram"] for row in rows) > 5
    assert not any(row.depth.drafted["router"] for row in rows)


def test_exit_without_exits_is_refused() -> None:
    with pytest.raises(ParamsError, match="cannot stop anywhere"):
        make_policy("exit", MANIFEST, DepthOptions())
