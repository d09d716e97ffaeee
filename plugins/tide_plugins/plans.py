"""Launch plans: a Python version of `csrc/*_plan.h`, which needs no compiler. A test compares the two."""

from __future__ import annotations

from dataclasses import dataclass

# csrc/down_projection_plan.h
GROUP_ROWS, GROUP_THREADS, SLICE_WIDTH, MAX_CHUNKS = 8, 256, 16, 32
TILE_ROWS, SMALL_TILE_ROWS, WARP_WIDTH, TILE_CHUNKS = 128, 32, 64, 8
STAGE_BYTES, MAX_STAGES, MAX_RING_BYTES = 64, 8, 60 * 1024
LOOP_THREADS = 256  # csrc/decode_loop_plan.h
SCORE_THREADS, SCORE_PIECES, MAX_SCORE_BLOCKS = 256, 4, 32  # csrc/exit_score_plan.h
# csrc/exit_router_plan.h, exit_translate_plan.h, exit_select_plan.h, draft_verify_plan.h
MAX_ROUTER_WIDTH, MOST_DECODE_ROWS = 256, 128
MAX_RANK, UP_THREADS, UP_LANES = 128, 256, 8
SELECT_THREADS, MOST_SELECT_BLOCKS = 256, 1024
MOST_VERIFY_THREADS = 1024

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchPlan:
    """Configuration of one launch.

    Args:
        grid, block: number of blocks, and of threads per block.
        shared_bytes: dynamic shared memory of a block; above 48 KiB the launcher opts in.
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
    """``chunk``: elements of the hidden size per block. ``tile_rows``: rows per block of the form for many rows, else 0."""

    launch: LaunchPlan
    chunk: int
    tile_rows: int

    @property
    def tiled(self) -> bool:
        """Whether to launch the form for many rows."""
        return self.tile_rows > 0


@dataclass(frozen=True)
class TranslatePlan:
    """Two launches, one after the other. ``chunk``: elements of the hidden size per block of the first."""

    down: LaunchPlan
    up: LaunchPlan
    chunk: int


def plan_exit_router(rows: int, hidden_size: int, width: int, element_bytes: int, sm_count: int) -> RouterPlan:
    """The plan for states ``[rows, hidden_size]`` and a router of ``width`` on a GPU with ``sm_count`` multiprocessors."""
    if rows > MOST_DECODE_ROWS:
        return _plan_tile_projection(rows, hidden_size, width, element_bytes, sm_count)
    return RouterPlan(*_plan_group_projection(rows, hidden_size, width, element_bytes, sm_count), 0)


def plan_exit_translate(rows: int, hidden_size: int, rank: int, element_bytes: int, sm_count: int) -> TranslatePlan:
    """The plan for states ``[rows, hidden_size]`` and an exit head of ``rank``."""
    down, chunk = _plan_group_projection(rows, hidden_size, rank, element_bytes, sm_count)
    up = LaunchPlan((_divide_up(hidden_size, UP_THREADS // UP_LANES), down.grid[2], 1), (UP_THREADS, 1, 1))
    return TranslatePlan(down, up, chunk)


def plan_exit_select(rows: int, hidden_size: int, element_bytes: int, in_place: bool) -> LaunchPlan:
    """``in_place``: the continuing rows are gathered into the tensor they come from."""
    columns = _divide_up(hidden_size, SELECT_THREADS * 16 // element_bytes)
    return LaunchPlan((1 if in_place else _clamp(rows, 1, MOST_SELECT_BLOCKS), columns, 1), (SELECT_THREADS, 1, 1))


def plan_draft_verify(rows: int, vocab: int, sampling: bool) -> LaunchPlan:
    """One block per row; greedy verification needs only one warp."""
    threads = _clamp(_round_up(_divide_up(vocab, 16), 32), 32, MOST_VERIFY_THREADS) if sampling else 32
    return LaunchPlan((max(rows, 1), 1, 1), (threads, 1, 1), counters=1)


def plan_loop_block() -> LaunchPlan:
    """One block for all rows: `loop_turn`, `exit_candidates`, `exit_gate`, `exit_merge`."""
    return LaunchPlan((1, 1, 1), (LOOP_THREADS, 1, 1))


def plan_exit_score(rows: int, vocab: int, element_bytes: int) -> LaunchPlan:
    """Blocks of a row read 16 KiB of its logits each, or more in large vocabularies."""
    some = max(rows, 1)
    blocks = _clamp(_divide_up(vocab, SCORE_THREADS * SCORE_PIECES * 16 // element_bytes), 1, MAX_SCORE_BLOCKS)
    return LaunchPlan((blocks, some, 1), (SCORE_THREADS, 1, 1), counters=some, workspace_bytes=some * blocks * 4)


def plan_exit_join(rows: int, arriving: int) -> LaunchPlan:
    """One block per state that may arrive: up to ``arriving`` per row."""
    return LaunchPlan((max(rows, 1), max(arriving, 1), 1), (LOOP_THREADS, 1, 1))


def _plan_group_projection(rows: int, hidden_size: int, width: int, element_bytes: int, sm_count: int) -> tuple[LaunchPlan, int]:
    groups, slices = _divide_up(max(rows, 1), GROUP_ROWS), _divide_up(width, SLICE_WIDTH)
    wanted = _divide_up(2 * sm_count, groups * slices)
    chunk = _chunk_of(hidden_size, 32 * 16 // element_bytes, wanted, MAX_CHUNKS)
    chunks, pitch = _divide_up(hidden_size, chunk), slices * SLICE_WIDTH
    workspace = _projection_bytes(groups, chunks, GROUP_ROWS, pitch)
    return LaunchPlan((chunks, slices, groups), (GROUP_THREADS, 1, 1), GROUP_ROWS * pitch * 4, groups + 1, workspace), chunk


def _plan_tile_projection(rows: int, hidden_size: int, width: int, element_bytes: int, sm_count: int) -> RouterPlan:
    tile_rows = SMALL_TILE_ROWS if 2 * _divide_up(rows, SMALL_TILE_ROWS) <= sm_count else TILE_ROWS
    tiles, pitch = _divide_up(max(rows, 1), tile_rows), _round_up(width, WARP_WIDTH)
    chunk = _chunk_of(hidden_size, 8 * STAGE_BYTES // element_bytes, sm_count // tiles, TILE_CHUNKS)
    chunks = _divide_up(hidden_size, chunk)
    stage_bytes = (tile_rows + pitch) * STAGE_BYTES
    shared = _clamp(MAX_RING_BYTES // stage_bytes, 2, MAX_STAGES) * stage_bytes
    workspace = _projection_bytes(tiles, chunks, tile_rows, pitch)
    launch = LaunchPlan((chunks, 1, tiles), (TILE_ROWS * pitch // WARP_WIDTH, 1, 1), shared, tiles + 1, workspace)
    return RouterPlan(launch, chunk, tile_rows)


def _chunk_of(hidden_size: int, step: int, wanted: int, most: int) -> int:
    steps = _divide_up(hidden_size, step)
    return _divide_up(steps, _clamp(wanted, 1, min(steps, most))) * step


def _projection_bytes(groups: int, chunks: int, group_rows: int, pitch: int) -> int:
    return groups * chunks * group_rows * (pitch + 2) * 4


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)


def _round_up(value: int, to: int) -> int:
    return _divide_up(value, to) * to


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
