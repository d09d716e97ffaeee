"""What is skipped is not run: launches counted where the graphs are run, for every policy."""

from typing import Any

import numpy as np
import pytest
from runtime.numpy_backend import NumpyBackend, Script, tiny_manifest
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, make_row
from runtime.tiny_transformer import Array, TinyTransformer
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run

LAYERS, SLOTS, TOKENS = 6, 64, 25
SILENT = (0.5, 0.5, 0.0, 0.0, 0.0, 0.0)  # an exit after 2 layers says what the model says: every draft is accepted
STEPS = TOKENS - 1  # the first token is the prefill's


def decode_launches(
    policy: str,
    exits: list[ExitInfo],
    *,
    rows: int = 1,
    checkpoints: tuple[int, ...] = (2, 4),
    script: Script | None = None,
    tokens: int = TOKENS,
    **options: Any,
) -> dict[str, int]:
    """Launches per graph after the prompts, which take one of everything together."""
    model = TinyTransformer(3, SILENT, 31, SLOTS)
    manifest = tiny_manifest(model, checkpoints, exits)
    backend = NumpyBackend(manifest, model, script)
    params = GenerationParams(max_new_tokens=tokens)
    requests = [Request((1 + row, 2, 3), params, row) for row in range(rows)]
    made = exits_pay(make_policy(policy, manifest, DepthOptions(**{"draft": "router", **options})))
    context, batch = backend.context(rows), [make_row(request, manifest) for request in requests]
    list(run(made, context, batch))
    layers = sum(backend.launches[g.name] * (g.layers[1] - g.layers[0]) for g in manifest.segments if g.layers)
    assert context.layers_launched == layers
    assert batch[0].depth.layers_run == layers - LAYERS  # what the stats show as layers per token
    prefills = {segment.name: 1 for segment in manifest.segments}
    return {name: count - prefills.get(name, 0) for name, count in sorted(backend.launches.items())}


def exit_after(checkpoint: int, head: str = "identity", router: str = "max_probability", threshold: float = 0.0) -> ExitInfo:
    return ExitInfo(checkpoint, head, router, threshold, threshold, 0.5)


def scores(*answers: float) -> Script:
    """Each time an MLP is asked it gives the next of ``answers``, over and over."""
    asked = 0

    def script(graph: str, states: Array) -> Array:
        nonlocal asked
        asked += 1
        return np.full(len(states), answers[(asked - 1) % len(answers)])

    return script


def test_full_launches_everything_once_per_token() -> None:
    counts = decode_launches("full", [exit_after(2)])
    assert counts == {"segment_0": STEPS, "segment_1": STEPS, "segment_2": STEPS}


# --- exit


def test_tokens_that_exit_launch_nothing_behind_their_exit() -> None:
    assert decode_launches("exit", [exit_after(2)]) == {"head": STEPS, "segment_0": STEPS, "segment_1": 0, "segment_2": 0}


def test_depth_is_run_for_all_that_wait_when_no_more_can_wait() -> None:
    counts = decode_launches("exit", [exit_after(2)], tuning=DepthTuning(exit_room=9))
    assert counts == {"head": STEPS, "segment_0": STEPS, "segment_1": STEPS // 8 - 1, "segment_2": STEPS // 8 - 1}


@pytest.mark.parametrize("streak", [1, 3])
def test_a_forced_token_asks_no_exit_and_takes_along_all_that_waits(streak: int) -> None:
    forced = STEPS // (streak + 1)
    counts = decode_launches("exit", [exit_after(2)], max_exit_streak=streak)
    assert counts == {"head": STEPS - forced, "segment_0": STEPS, "segment_1": forced, "segment_2": forced}


def test_half_the_tokens_exiting_launch_half_the_depth() -> None:
    """The head is run for those that exit, never for a score that refuses; deep tokens get their logits in the last segment."""
    counts = decode_launches("exit", [exit_after(2, router="mlp", threshold=0.5)], script=scores(0.0, 1.0))
    half = STEPS // 2
    assert counts == {"exit_2": STEPS, "head": half, "segment_0": STEPS, "segment_1": half, "segment_2": half}


def test_stopping_at_the_second_exit_runs_the_segment_between_and_no_more() -> None:
    exits = [exit_after(2, router="mlp", threshold=0.5), exit_after(4)]
    counts = decode_launches("exit", exits, script=scores(0.0))
    assert counts == {"exit_2": STEPS, "head": STEPS, "segment_0": STEPS, "segment_1": STEPS, "segment_2": 0}


def test_a_tail_exit_skips_the_middle() -> None:
    counts = decode_launches("exit", [exit_after(2, "tail:2")])
    assert counts == {"exit_2": STEPS, "segment_0": STEPS, "segment_1": 0, "segment_2": STEPS}


def test_exits_below_min_depth_are_not_asked() -> None:
    counts = decode_launches("exit", [exit_after(2, "linear"), exit_after(4)], min_depth=4)
    assert counts == {"head": STEPS, "segment_0": STEPS, "segment_1": STEPS, "segment_2": 0}


@pytest.mark.parametrize("wait", [0, 1, 3])
def test_a_row_that_needs_depth_waits_for_company_only_so_long(wait: int) -> None:
    """Alone among rows that exit, it goes deep at every step (the others wait for it each time), or never."""
    model = TinyTransformer(3, SILENT, 31, SLOTS)
    manifest = tiny_manifest(model, (2, 4), [exit_after(2, router="mlp", threshold=0.5)])
    asked: list[Request] = [Request((1 + n, 2, 3), GenerationParams(max_new_tokens=TOKENS), n) for n in range(5)]
    rows = [make_row(request, manifest) for request in asked]

    def the_first_refuses(graph: str, states: Array) -> Array:  # while it is held only the others are asked
        return np.array([0.0, 1.0, 1.0, 1.0, 1.0][-len(states) :])

    backend = NumpyBackend(manifest, model, the_first_refuses)
    policy = exits_pay(make_policy("exit", manifest, DepthOptions(max_wait_steps=wait)))
    for event in run(policy, backend.context(5), rows):
        assert rows[0].policy_state is None or rows[0].policy_state.waited_steps <= wait
        if event.sequence is rows[1] and event.sequence.finish_reason is not None:
            break
    assert len(rows[0].depth.token_depths) == STEPS // (wait + 1)
    assert backend.launches["segment_1"] == 1 + STEPS // (wait + 1)  # one for all prompts


def test_a_deep_pass_of_one_row_serves_the_rows_that_wait_with_it() -> None:
    """Four rows, of which two go deep at every second step: one launch for both."""

    def two_refuse(graph: str, states: Array) -> Array:
        return np.array([0.0, 0.0, 1.0, 1.0])

    counts = decode_launches("exit", [exit_after(2, router="mlp", threshold=0.5)], rows=4, script=two_refuse)
    assert counts["segment_0"] == counts["exit_2"] == STEPS
    assert counts["segment_1"] == counts["segment_2"] == STEPS


# --- exact


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_accepted_drafts_share_one_deep_pass(limit: int) -> None:
    passes = STEPS // (limit + 1)
    counts = decode_launches("exact", [exit_after(2)], draft_limit=limit, tuning=FAR_DRAFTS)
    # The last draft of a pass goes through the first segment with the deep pass.
    assert counts == {"head": passes * limit, "segment_0": STEPS, "segment_1": passes, "segment_2": passes}


def test_the_first_drafts_of_a_text_are_few() -> None:
    """Wrong drafts of a text that early layers do not know would cost most before anybody knows that."""
    cycles = [2, 3, 5, 6, 6]  # tokens: 1, 2, 4 and from then on 5 drafts, the limit, and one token more
    counts = decode_launches("exact", [exit_after(2)], draft_limit=5, tokens=sum(cycles) + 1)
    assert counts == {"head": sum(cycles) - 5, "segment_0": sum(cycles), "segment_1": 5, "segment_2": 5}


def test_drafts_through_a_tail_skip_the_middle() -> None:
    counts = decode_launches("exact", [exit_after(2, "tail:2", "mlp")], draft_limit=5, script=scores(1.0))
    passes, tokens = decode_launches("exact", [exit_after(2)], draft_limit=5)["segment_1"], counts["exit_2"]
    assert counts["segment_2"] == tokens + counts["segment_1"]  # once per draft, once per deep pass
    assert counts["segment_1"] >= passes and counts["segment_1"] < STEPS


def test_copied_drafts_launch_everything_once_per_pass() -> None:
    """The text of silent layers repeats soon; then one pass serves a whole copy."""
    counts = decode_launches("exact", [], draft="ngram", draft_limit=5, tokens=40)
    assert counts["segment_0"] == counts["segment_1"] == counts["segment_2"] < 20


def test_no_drafts_are_full() -> None:
    assert decode_launches("exact", [exit_after(2)], draft="none") == decode_launches("full", [exit_after(2)])


def test_a_router_that_refuses_costs_its_graph_and_nothing_else() -> None:
    counts = decode_launches("exact", [exit_after(2, "linear", "mlp", threshold=0.5)], script=scores(0.0))
    assert counts == {"exit_2": STEPS - 1, "segment_0": STEPS, "segment_1": STEPS, "segment_2": STEPS}


@pytest.mark.parametrize("policy", ["exact", "exit"])
def test_a_batch_shares_its_launches(policy: str) -> None:
    """Rows in step cost what one row costs."""
    alone = decode_launches(policy, [exit_after(2)], draft_limit=3)
    assert decode_launches(policy, [exit_after(2)], draft_limit=3, rows=5) == alone
