"""Launch plans: grids, blocks and memory of the kernels' launches, from the problem's shape."""

from __future__ import annotations

from dataclasses import dataclass

# csrc/exit_router.cuh. One warp adds the parts of a row's norm, one chunk per lane; a lane reads up to 8 elements at a time.
GROUP_ROWS = 8
GROUP_THREADS = 256
SLICE_WIDTH = 16
MAX_CHUNKS = 32
CHUNK_STEP = 256
MAX_ROUTER_WIDTH = 256
LOOP_THREADS = 256  # csrc/loop_threads.h
TEXT_THREADS = 512  # csrc/text_drafts.h
# csrc/exit_score_params.h. Pieces are 16 bytes per thread; one warp adds the sums of a row's blocks, one per lane.
SCORE_THREADS = 256
SCORE_PIECES = 4
MAX_SCORE_BLOCKS = 32
# csrc/choose_token_params.h. A thread reads about as many tokens; one warp takes the largest of a row's blocks, one per lane.
CHOOSE_THREADS = 256
CHOOSE_TOKENS = 16
MAX_CHOOSE_BLOCKS = 32
CHOOSE_SCRATCH_BYTES = 33200

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchPlan:
    """Configuration of one launch.

    Args:
        grid, block: number of blocks, and of threads per block.
        shared_bytes: dynamic shared memory of a block.
        counters: uint32 in device memory, zero before the first launch; every launch leaves them zero.
        workspace_bytes: 256-byte aligned device memory, contents irrelevant.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    counters: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class RouterPlan:
    """Two launches, one after the other.

    Args:
        chunk: elements of the hidden size per block of the first.
        partial: float32 elements that the first leaves for the second.
    """

    project: LaunchPlan
    score: LaunchPlan
    chunk: int
    partial: int


def plan_exit_router(rows: int, hidden_size: int, width: int) -> RouterPlan:
    """The plan for states ``[rows, hidden_size]`` and a router of ``width``."""
    chunk = router_chunk(hidden_size)
    groups = _divide_up(max(rows, 1), GROUP_ROWS)
    chunks = _divide_up(hidden_size, chunk)
    slices = _divide_up(width, SLICE_WIDTH)
    project = LaunchPlan((chunks, slices, groups), (GROUP_THREADS, 1, 1))
    score = LaunchPlan((groups, 1, 1), (GROUP_THREADS, 1, 1), shared_bytes=GROUP_ROWS * slices * SLICE_WIDTH * 4)
    return RouterPlan(project, score, chunk, groups * chunks * GROUP_ROWS * (slices * SLICE_WIDTH + 1))


def router_chunk(hidden_size: int) -> int:
    """Numbers of ``hidden_size`` in one chunk: as many chunks as one warp adds, so that one row keeps a large GPU busy.

    It does not depend on the GPU or the number of rows, so neither do a score's bits.
    """
    return _divide_up(_divide_up(hidden_size, CHUNK_STEP), MAX_CHUNKS) * CHUNK_STEP


def plan_loop_block() -> LaunchPlan:
    """One block for all rows: `take_tokens`, `loop_turn`, `exit_candidates`, `exit_gate`, `exit_merge`,
    `text_accept`."""
    return LaunchPlan((1, 1, 1), (LOOP_THREADS, 1, 1))


def plan_exit_score(rows: int, vocab: int, element_bytes: int) -> LaunchPlan:
    """Blocks of a row read 16 KiB of its logits each, or more in large vocabularies."""
    some = max(rows, 1)
    blocks = _clamp(_divide_up(vocab, SCORE_THREADS * SCORE_PIECES * 16 // element_bytes), 1, MAX_SCORE_BLOCKS)
    return LaunchPlan((blocks, some, 1), (SCORE_THREADS, 1, 1), counters=some, workspace_bytes=some * blocks * 4)


def plan_choose_token(rows: int, vocab: int) -> LaunchPlan:
    """One plan for all three launches: peak, cut and race."""
    some = max(rows, 1)
    blocks = _clamp(_divide_up(vocab, CHOOSE_THREADS * CHOOSE_TOKENS), 1, MAX_CHOOSE_BLOCKS)
    grid = (blocks, some, 1)
    scratch = some * CHOOSE_SCRATCH_BYTES
    return LaunchPlan(grid, (CHOOSE_THREADS, 1, 1), counters=some, workspace_bytes=scratch)


def plan_exit_states(rows: int, tokens: int) -> LaunchPlan:
    """One block per state of up to ``tokens`` per row: `exit_join`, `exit_inputs`."""
    return LaunchPlan((max(rows, 1), max(tokens, 1), 1), (LOOP_THREADS, 1, 1))


def plan_text_drafts(rows: int) -> LaunchPlan:
    """A block for each row's text."""
    return LaunchPlan((max(rows, 1), 1, 1), (TEXT_THREADS, 1, 1), counters=1)


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
