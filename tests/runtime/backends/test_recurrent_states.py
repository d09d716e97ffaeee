"""States of recurrent layers in host memory: which buffer holds them, and what a step without tokens of a row leaves alone."""

from dataclasses import replace

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.backends.recurrent_states import RecurrentStates, StateSnapshots, StepStates, state_bytes
from tide_runtime.bundle.manifest import LayerInfo, StateInfo

STATES = [StateInfo("convolution", [3, 2]), StateInfo("recurrence", [2, 4, 5])]
MANIFEST = replace(tiny_manifest(TinyTransformer(0, (0.5, 0.5), 9, 32), [1]), layers=[LayerInfo(), LayerInfo(states=STATES)])
OPERANDS = {"undo_1_0_rows": [2]}


@pytest.fixture
def states() -> RecurrentStates:
    """Four rows, which hold 1, 2, 3 and 4."""
    made = RecurrentStates(MANIFEST, 4, OPERANDS)
    for row in range(4):
        made.begin(row, [1], [0], [1], 1)
        _write(made, row, row + 1)
    return made


def _write(states: RecurrentStates, row: int, value: float) -> None:
    for array in states.row(row):
        array[...] = value


def _held(states: RecurrentStates) -> list[float]:
    return [float(array.flat[0]) for array in (states.row(row)[1] for row in range(4))]


def _drafts(states: RecurrentStates, first: int, counts: list[int], cached: int = 8) -> StepStates:
    """A step with drafts, of which the rows with tokens get 10 times what they held; a kernel copies the others."""
    step = states.begin(first, counts, [cached] * len(counts), counts, sum(counts))
    for row, count in enumerate(counts, first):
        for array in states.arrays.values():
            array[step.target, row] = array[step.source, row] * (10 if count else 1)
    return step


def test_a_step_without_drafts_works_in_place(states: RecurrentStates) -> None:
    """Breaks: every decode, which would need a second buffer, and operands that are never read."""
    step = states.begin(0, [1, 0, 5, 1], [8, 0, 8, 8], [1, 0, 1, 1], 7)
    assert step.source == step.target
    assert not states.operands(step, 7)
    assert _held(states) == [1, 2, 3, 4]


def test_drafts_keep_the_state_before_them(states: RecurrentStates) -> None:
    """Breaks: rejected drafts, which could not be undone."""
    step = _drafts(states, 0, [3, 0, 1, 2])
    assert _held(states) == [10, 2, 30, 40]
    assert states.arrays["state_1_1"][step.source, 0].flat[0] == 1
    assert {name: view.shape for name, view in states.operands(step, 6).items()} == {"undo_1_0_rows": (1, 6, 2)}


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_rows_of_a_launch_come_into_one_buffer(states: RecurrentStates, drafted: int) -> None:
    """Breaks: a launch over rows of which some drafted alone before, and a row between them that has no tokens."""
    _drafts(states, drafted, [2])
    wanted = [(10 if row == drafted else 1) * (row + 1) for row in range(4)]
    step = states.begin(0, [2, 0, 1, 1], [8, 8, 8, 8], [1, 0, 1, 1], 4)
    assert _held(states) == wanted
    assert [float(states.arrays["state_1_0"][step.source, row].flat[0]) for row in range(4)] == wanted


def test_a_text_begins_with_zeros(states: RecurrentStates) -> None:
    """Breaks: a request that goes on from what its row held before."""
    states.forget_row(2)
    states.begin(1, [1, 1], [8, 0], [1, 1], 2)
    assert _held(states) == [1, 2, 0, 4]


def test_steps_that_are_judged_together_keep_their_operands(states: RecurrentStates) -> None:
    """Breaks: near the end of the cache, where rows run alone: the second step would overwrite the first one's operands."""
    first, second = _drafts(states, 0, [3]), _drafts(states, 1, [5])
    ours, theirs = (states.operands(step, tokens)["undo_1_0_rows"] for step, tokens in ((first, 3), (second, 5)))
    ours[...], theirs[...] = 1, 2
    assert (ours == 1).all()
    states.cut_rows([0, 1], [11, 13], lambda: pytest.fail("nothing was rejected"))
    assert _drafts(states, 2, [3]).number == first.number  # free again


def test_moves_and_snapshots_take_the_latest_state(states: RecurrentStates) -> None:
    """Breaks: copies of the buffer that holds what was before the drafts."""
    snapshots = StateSnapshots(states, 3)
    _drafts(states, 0, [2, 1])
    snapshots.save(1, 2)
    states.move_row(0, 3)
    assert _held(states) == [10, 20, 3, 10]
    states.forget_row(2)
    states.release_row(2)
    snapshots.load(2, 2)
    assert _held(states) == [10, 20, 20, 10]
    snapshots.release([2])
    snapshots.load(2, 2)
    assert _held(states)[2] == 0  # its memory was given back


def test_bytes_of_a_sequence() -> None:
    """Breaks: the memory budget."""
    assert state_bytes(MANIFEST) == 4 * (6 + 40)
    assert sum(array.nbytes for array in RecurrentStates(MANIFEST, 3, {}).arrays.values()) == 2 * 3 * state_bytes(MANIFEST)
