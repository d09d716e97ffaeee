"""What requests get of memory, in blocks of keys and values, and of a step, in prompt tokens beside decodes."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from tide_runtime.backends.device.device import Device
from tide_runtime.backends.kv_caches import blocks_of
from tide_runtime.backends.recurrent_states import StateMemory
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.errors import ParamsError

_FREE_MEMORY_SHARE = 0.25  # share of the memory that is free when the engine is loaded
_PREFIX_FACTOR = 4  # by default, at most this multiple of the running requests' memory is taken
_MAX_SLOWDOWN = 2.5  # a step with prompts takes at most this multiple of its time without them
_MIN_TOKENS = 16  # prompt tokens of a step in any case; budgets are multiples of it
MAX_CHUNK = 512
_CHUNKS, _CHUNK_EXCESS = (64, 128, 256, MAX_CHUNK), 1.05  # see `prompt_chunk`


def kv_blocks(memory: StateMemory, budget: int | None, rows: int, slots: int, on_device: bool = False) -> int:
    """Blocks of KV memory for ``rows`` requests of up to ``slots`` tokens and the prefix cache.

    Args:
        budget: bytes; None: a quarter of what the machine has free, and no more than could be used.
        on_device: the rows are in the memory of a device, which tells when it is short; prefixes add to them, see
            `kept_on_device`.

    Raises ParamsError when ``budget`` does not hold one sequence of full length.
    """
    block_bytes = memory.block_bytes
    min_blocks = memory.row_blocks + blocks_of(slots)
    if budget is None and on_device:
        return rows * min_blocks
    if budget is None:
        return share_of(free_memory(), memory, rows, slots) // block_bytes
    if budget < min_blocks * block_bytes:
        states = f" ({memory.row_blocks * block_bytes} of them for its recurrent layers)" if memory.row_blocks else ""
        raise ParamsError(
            f"kv_memory is {budget} bytes, one sequence of {slots} tokens needs {min_blocks * block_bytes}{states}; set it to at "
            "least that, or export with a smaller --max-seq-len"
        )
    return budget // block_bytes


def device_blocks(device: Device, memory: StateMemory, max_blocks: int) -> int:
    """Blocks of a prefix cache in the memory of ``device``: a quarter of what is free there, and at most ``max_blocks``."""
    free: int | None = getattr(device, "free_memory", free_memory)()
    return min(max_blocks, int(_FREE_MEMORY_SHARE * (free_memory() if free is None else free)) // memory.block_bytes)


def share_of(available: int, memory: StateMemory, rows: int, slots: int) -> int:
    """Bytes of KV memory that an engine takes by default of ``available`` ones: at least what one sequence needs."""
    min_blocks = memory.row_blocks + blocks_of(slots)
    max_blocks = _PREFIX_FACTOR * rows * min_blocks
    return memory.block_bytes * min(max(min_blocks, int(_FREE_MEMORY_SHARE * available) // memory.block_bytes), max_blocks)


def free_memory() -> int:
    """Bytes that this process can still take: of the machine, and of its control group if that has a limit."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])]
    with suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free))


def prompt_chunk(costs: CostModel, shared: bool) -> int:
    """Prompt tokens of a step that suit a machine and a bundle.

    Attention multiplies the whole square of a chunk, so small chunks halve it; each launch reads all weights, so that they must
    not be too small: the smallest whose tokens cost little more than the largest's. Launches that are not ``shared``, on GPUs,
    take the largest.
    """
    if not shared:
        return MAX_CHUNK
    per_token = {chunk: costs.packed(1, 0, chunk) / chunk for chunk in _CHUNKS}
    bound = _CHUNK_EXCESS * per_token[MAX_CHUNK]
    return next(chunk for chunk in _CHUNKS if per_token[chunk] <= bound)


class StepBudget:
    """Prompt tokens of a step by the number of requests that decode in it, so that a long prompt does not stall their tokens.

    Args:
        max_tokens: prompt tokens of a step in which nothing decodes; None: see `prompt_chunk`.
        shared: prompts and decodes share a launch. Otherwise each prompt has a launch of its own, of ``max_tokens`` tokens.
    """

    def __init__(self, costs: CostModel, max_tokens: int | None, shared: bool) -> None:
        self._costs = costs
        self._max_tokens = max_tokens or prompt_chunk(costs, shared)
        self._shared = shared
        self.tokens = cache(self._tokens)

    def __call__(self, decoding: int) -> int:
        return self.tokens(decoding) if decoding and self._shared else self._max_tokens

    def _tokens(self, decoding: int) -> int:
        bound = _MAX_SLOWDOWN * self._costs.packed(decoding, decoding, 0)
        tokens = _MIN_TOKENS
        while tokens < self._max_tokens and self._costs.packed(decoding, decoding, tokens + _MIN_TOKENS) <= bound:
            tokens += _MIN_TOKENS
        return min(self._max_tokens, tokens)
