"""Policy `exact` on a machine whose kernels compute other bits where many tokens share a launch: its text stays `full`'s."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from runtime.numpy_backend import NumpyBackend, NumpyContext, NumpyStep, tiny_manifest
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.generation_params import GenerationParams
from tide_runtime.outputs import finished
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

MODEL = TinyTransformer(3, (0.5, 0.5, 0.0, 0.0), 31, 96)  # an exit after 2 layers says what the model says
MANIFEST = tiny_manifest(MODEL, (2,), [ExitInfo(2, "identity", "max_probability", 0.0, 0.0, 0.5)])


class CoarseContext(NumpyContext):
    """Launches of more than ``limit`` tokens, padding included, give other logits. ``most``: tokens of the largest launch."""

    def __init__(self, capacity: int, limit: int) -> None:
        super().__init__(NumpyBackend(MANIFEST, MODEL), capacity)
        self.limit, self.most = limit, 0

    def step(self, first_row: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> NumpyStep:
        step, tokens = super().step(first_row, counts, wanted), len(counts) * max(counts)
        self.most, launch = max(self.most, tokens), step.run

        def run_coarsely(graph: str) -> None:
            launch(graph)
            step.logits *= -1
            step.token[:] = step.logits.argmax(-1)

        if tokens > self.limit:
            step.run = run_coarsely  # type: ignore[method-assign]
        return step


def exact(invariant_tokens: int | None, draft: str, rounds: bool = True) -> ExactDepth:
    options = DepthOptions(draft=draft, draft_limit=12, tuning=FAR_DRAFTS)  # type: ignore[arg-type]
    policy = exits_pay(ExactDepth(MANIFEST, options))
    policy.keep_within(invariant_tokens, rounds)
    return policy


def generate(policy: DepthPolicy, rows: int, limit: int) -> tuple[list[TokenSequence], CoarseContext]:
    params = GenerationParams(max_new_tokens=60)
    batch = [make_row(Request((1 + row, 2, 3), params, row), MANIFEST) for row in range(rows)]
    context = CoarseContext(rows, limit)
    list(run(policy, context, batch, chunk=2))
    return batch, context


def texts(rows: Sequence[TokenSequence]) -> list[list[int]]:
    return [row.new_tokens.tolist() for row in rows]


@pytest.mark.parametrize("draft", ["router", "ngram", "all"])
@pytest.mark.parametrize(("limit", "rows"), [(2, 1), (5, 1), (4, 2), (8, 3), (3, 2)])
def test_verification_stays_within_the_limit(limit: int, rows: int, draft: str) -> None:
    """A verification pass of more tokens would read other logits, and the text would no longer be `full`'s."""
    expected, _ = generate(FullDepth(), rows, limit)
    found, context = generate(exact(limit, draft), rows, limit)
    assert texts(found) == texts(expected)
    assert context.most == max(2, limit // rows * rows)  # 2: the prompt's chunks
    assert any(sum(row.depth.drafted.values()) for row in found) == (limit // rows > 1)


@pytest.mark.parametrize("draft", ["router", "ngram"])
def test_without_the_limit_the_text_would_differ(draft: str) -> None:
    """The test above would pass on any policy if these launches gave the same logits."""
    expected, _ = generate(FullDepth(), 1, 4)
    found, context = generate(exact(None, draft), 1, 4)
    assert context.most > 4 and texts(found) != texts(expected)


def test_where_no_draft_fits_exact_is_full_and_says_so() -> None:
    """A user would wonder why drafts bring nothing, or read `exact` where nothing was drafted."""
    with pytest.warns(RuntimeWarning, match="runs as full"):
        policy = exact(1, "all")
    (row,), _ = generate(policy, 1, 2)
    assert finished(row, policy.name, None).stats.policy == "full"
    assert not row.depth.drafted


def test_sums_in_another_order_limit_no_drafts(recwarn: pytest.WarningsRecorder) -> None:
    """Bundles in fp32 would lose their drafts on machines where a launch of several tokens differs in the last bit."""
    policy = exact(1, "all", rounds=False)
    (row,), context = generate(policy, 1, 100)
    assert context.most > 4 and sum(row.depth.drafted.values())
    assert finished(row, policy.name, None).stats.policy == "exact"
    assert "almost equally likely" in str(policy.limitation) and exact(None, "all", rounds=False).limitation is None
    assert not recwarn.list


@pytest.mark.parametrize(("invariant_tokens", "observed"), [(None, True), (1, False)])
def test_drafts_follow_the_clock_only_where_they_leave_the_bits(
    invariant_tokens: int | None, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums differ, a text must not depend on what else the machine does."""
    policy, passes = exact(invariant_tokens, "ngram", rounds=False), list[Sequence[int]]()
    monkeypatch.setattr(policy.controller, "observe_pass", lambda counts, ms: passes.append(counts))
    generate(policy, 1, 100)
    assert any(sum(counts) > 1 for counts in passes) is observed


def test_a_limit_is_named_and_none_is_not(recwarn: pytest.WarningsRecorder) -> None:
    """`tide-run --stats` shows it; a warning for a limit that allows drafts would only disturb."""
    assert "at most 16 tokens" in str(exact(16, "all").limitation)
    assert exact(None, "all").limitation is None
    assert not recwarn.list
