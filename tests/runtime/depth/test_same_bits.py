"""Policy `exact` where no padding of launches keeps a token's bits: what it may do, and what it says."""

import pytest
from runtime.numpy_backend import NumpyBackend, NumpyContext, tiny_manifest
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import BackendFacts
from tide_runtime.depth.registry import make_policy
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run

MODEL = TinyTransformer(3, (0.5, 0.5, 0.0, 0.0), 31, 96)  # an exit after 2 layers says what the model says
MANIFEST = tiny_manifest(MODEL, (2,), [ExitInfo(2, "identity", "max_probability", 0.0, 0.0, 0.5)])
OPTIONS = DepthOptions(draft="ngram", draft_limit=12, tuning=FAR_DRAFTS)
PASSES = CostTable("numpy", "here", 10.0, [StepCost(1, seq, 0.0, 10.0, 0.0, 0.0, 0.0) for seq in (1, 13)])


@pytest.mark.parametrize(
    ("name", "same_bits", "rounds", "ran"),
    [
        ("exact", True, True, "exact"),
        ("exact", False, True, "full"),  # low bits: drafts would change many texts
        ("exact", False, False, "exact"),  # sums in another order: only where two tokens are almost equally likely
        ("auto", True, False, "exact"),
        ("auto", False, True, "full"),
        ("auto", False, False, "full"),  # nothing that may change a text is a default
        ("full", False, True, "full"),
    ],
)
def test_drafts_only_where_they_leave_the_text(name: str, same_bits: bool, rounds: bool, ran: str) -> None:
    """A default would change texts, or bundles in fp32 would lose their drafts."""
    assert make_policy(name, MANIFEST, OPTIONS, BackendFacts(same_bits=same_bits, rounds=rounds)).name == ran


@pytest.mark.parametrize("same_bits", [True, False])
def test_drafts_follow_the_clock_only_where_they_leave_the_bits(same_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums differ, a text must not depend on what else the machine does."""
    policy, passes = exits_pay(ExactDepth(MANIFEST, OPTIONS, PASSES, same_bits=same_bits)), list[int]()
    monkeypatch.setattr(policy.speculator.clock, "observe", lambda size, tokens, longest, ms: passes.append(tokens))
    row = make_row(Request((1, 2, 3), GenerationParams(max_new_tokens=60), 0), MANIFEST)
    list(run(policy, NumpyContext(NumpyBackend(MANIFEST, MODEL), 1), [row], chunk=2))
    assert sum(row.depth.drafted.values())
    assert any(tokens > 1 for tokens in passes) is same_bits
