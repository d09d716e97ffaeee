"""The engine's memory for keys and values: what the caller allows, or what the machine has."""

import mmap

import pytest
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.backends.recurrent_states import StateMemory
from tide_runtime.errors import ParamsError
from tide_runtime.scheduling import budgets
from tide_runtime.scheduling.budgets import free_memory, kv_blocks

TOKEN, SLOTS = 1000, 100  # bytes of a token; 7 blocks
BLOCK = TOKEN * BLOCK_TOKENS
MEMORY = StateMemory.of(TOKEN, 0)


def test_a_budget_is_whole_blocks() -> None:
    """Breaks: memory beyond what the caller allowed."""
    assert kv_blocks(MEMORY, 10 * BLOCK + BLOCK - 1, 4, SLOTS) == 10


def test_a_budget_below_one_sequence_is_refused() -> None:
    """Breaks: an engine that can never finish a long request."""
    assert kv_blocks(MEMORY, 7 * BLOCK, 4, SLOTS) == 7
    with pytest.raises(ParamsError, match=f"kv_memory is {7 * BLOCK - 1} bytes, one sequence of 100 tokens needs {7 * BLOCK}"):
        kv_blocks(MEMORY, 7 * BLOCK - 1, 4, SLOTS)


@pytest.mark.parametrize(
    ("free", "blocks"),
    [(0, 7), (4 * 6 * BLOCK, 7), (4 * 50 * BLOCK, 50), (10**15, 4 * 4 * 7)],
    ids=["none", "low", "quarter", "much"],
)
def test_by_default_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch, free: int, blocks: int) -> None:
    """Breaks: an engine that takes the whole machine, more than it can use, or less than one sequence."""
    monkeypatch.setattr(budgets, "free_memory", lambda: free)
    assert kv_blocks(MEMORY, None, 4, SLOTS) == blocks


def test_rows_of_a_device_are_not_bounded_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a GPU that runs one request at a time because the machine has little memory of its own."""
    monkeypatch.setattr(budgets, "free_memory", lambda: 0)
    assert kv_blocks(MEMORY, None, 4, SLOTS, on_device=True) == 4 * 7


def test_free_memory_is_that_of_a_machine() -> None:
    """Breaks: a unit that is mistaken (kB for bytes)."""
    assert 16 << 20 < free_memory() < 1 << 46


def test_states_take_their_blocks_beside_the_texts() -> None:
    """Breaks: recurrent models that overrun their budget, and an error that does not say why so little is too much."""
    memory = StateMemory.of(TOKEN, 3 * BLOCK - 1)
    assert memory == StateMemory(BLOCK, row_blocks=6, snapshot_blocks=3)  # two buffers, of which a snapshot keeps one
    assert kv_blocks(memory, 13 * BLOCK, 4, SLOTS) == 13
    with pytest.raises(ParamsError, match=rf"needs {13 * BLOCK} \({6 * BLOCK} of them for its recurrent layers\)"):
        kv_blocks(memory, 13 * BLOCK - 1, 4, SLOTS)


def test_a_model_without_keys_is_counted_in_pages() -> None:
    """Breaks: pure state-space models, whose blocks would have no bytes."""
    memory = StateMemory.of(0, 10 * mmap.PAGESIZE)
    assert memory == StateMemory(mmap.PAGESIZE, row_blocks=20, snapshot_blocks=10)
