"""What an engine takes of a budget of memory, from the bundle's files, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tide_runtime.backends.kv_caches import kv_bytes_per_token
from tide_runtime.backends.onnxruntime.packed_weights import PACKED_SHARE
from tide_runtime.backends.recurrent_states import StateMemory, state_bytes
from tide_runtime.backends.required_memory import required_memory
from tide_runtime.bundle import Bundle
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import DeviceMemoryError, TargetError
from tide_runtime.scheduling.budgets import kv_blocks, share_of

_CACHE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of a loaded engine.

    Args:
        weights: as they are mapped.
        steps: inputs, outputs and intermediate tensors of the largest step, about.
        kv: budget for keys, values and states, and the prefix cache.
    """

    weights: int
    steps: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.kv

    @classmethod
    def within(cls, limit: int, bundle: Bundle, options: EngineOptions) -> EngineMemory:
        """An engine of ``options``, which name its target; it takes no more than ``limit`` bytes in all.

        Without ``kv_memory`` in the options it takes a quarter of the limit, less where the weights leave less, and no more than
        it can use.

        Raises TargetError where the bundle has no such target, DeviceMemoryError where it takes more, ParamsError where
        ``kv_memory`` does not hold one sequence.
        """
        manifest = bundle.manifest
        target = options.target
        rows = options.max_batch
        if target not in manifest.targets:
            raise TargetError(f"the bundle has no target {target!r}, it has: {', '.join(manifest.targets)}")
        needed = required_memory(bundle, target, rows)
        packed = manifest.targets[target].backend == "onnxruntime-cpu" and manifest.dtype == "fp32"
        weights = int(PACKED_SHARE * needed.weights) if packed else needed.weights
        memory = StateMemory.of(kv_bytes_per_token(manifest.caches, _CACHE_BYTES[manifest.cache_dtype]), state_bytes(manifest))
        least = share_of(0, memory, rows, manifest.max_seq_len)
        if options.kv_memory is not None:
            kv = memory.block_bytes * kv_blocks(memory, options.kv_memory, rows, manifest.max_seq_len)
        else:
            kv = max(least, min(share_of(limit, memory, rows, manifest.max_seq_len), limit - weights - needed.steps))
        engine = cls(weights, needed.steps, kv)
        if engine.total > limit:
            raise DeviceMemoryError(
                f"it takes {_mib(engine.total)} ({_mib(weights)} of weights, {_mib(needed.steps)} of a step, {_mib(kv)} of keys "
                f"and values), and the limit is {_mib(limit)}; one sequence of {manifest.max_seq_len} tokens takes {_mib(least)}"
            )
        return engine

    def applied(self, options: EngineOptions) -> EngineOptions:
        """``options`` with this budget."""
        return replace(options, kv_memory=self.kv)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
