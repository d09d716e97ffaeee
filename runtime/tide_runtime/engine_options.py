"""How an engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import ParamsError
from tide_runtime.targets.target_choice import DeviceChoice

BITS = ("same", "fast")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Defaults suit embedding in a service.

    Args:
        target: which target of the bundle; ``auto`` takes the best one for ``device``.
        policy: depth policy: ``full``, ``exact``, ``exit``, or ``auto``: see `make_policy`.
        depth: options of the policies that skip layers.
        max_batch: requests that run at once, fewer where engines were built for fewer; more wait. Policy ``exit`` evaluates exits
            where that pays among so many sequences, so set it to 1 for one caller.
        prefill_chunk: most prompt tokens of a step; beside requests that decode fewer, so that their tokens keep coming. None:
            what suits the machine and the bundle, 64 to 512.
        kv_memory: bytes for keys, values and states of running requests and the prefix cache; None: a quarter of the free memory,
            up to four times what the running requests can use. When it is used up, requests wait, or are preempted and computed
            again. On a GPU None means all that is free: rows get memory when they are used, each for twice the longest text that
            runs at most, and where it is short, fewer requests run at once from then on; prefixes get a quarter at most.
        prefix_cache: keep keys and values of earlier texts, so that a prompt that begins like one of them is not computed again.
            Targets ``cpu`` and ``torch``. Requests choose with `GenerationParams.cache_salt` who may share them.
        prefix_dir: folder where prefixes of texts without a salt are kept beyond memory and this process; None: nowhere. The
            engines of a machine may share it. Target ``cpu`` only.
        prefix_disk: bytes that it takes at most; what was not used for longest goes first.
        max_queue: requests that may wait before `Engine.submit` refuses more.
        threads: ONNX Runtime's threads (see `ThreadOptions`).
        verify: compare the bundle's files with their SHA-256 when loading.
        bits: ``same``: launches on the CPU are padded so that a text does not depend on what shares them (`Engine.row_padding`).
            ``fast``: they are not, so that a single sequence costs one row, and where weights are in few bits or kernels sum in
            another order a text may depend on the requests beside it (`Engine.bits_limitation`).
        adapters: name → folder of LoRA adapters in PEFT's format, which requests choose by `GenerationParams.adapter`. Target
            ``cpu`` only. Their low-rank products run beside those of the model, whose weights stay as they are. Exits are off:
            they were calibrated for the model without adapters.
        share_weights: keep the weights packed in the machine's cache, where other processes with the same bundle map them, and
            not in this process's own memory; the first load takes longer, the cache grows by the size of the model. Bundles with
            exits or a draft head, and engines with adapters, always do. Target ``cpu`` only.
        device: ``auto`` (the GPU where the bundle has a target for it, else the processor), ``cpu``, ``cuda``, ``cuda:1``.
    """

    target: str = "auto"
    policy: str = "auto"
    depth: DepthOptions = field(default_factory=DepthOptions)
    max_batch: int = 16
    prefill_chunk: int | None = None
    kv_memory: int | None = None
    prefix_cache: bool = True
    prefix_dir: Path | str | None = None
    prefix_disk: int = 4 * 2**30
    max_queue: int = 1024
    threads: ThreadOptions = field(default_factory=ThreadOptions)
    verify: bool = True
    device: str = "auto"
    bits: str = BITS[0]
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    share_weights: bool = False

    def __post_init__(self) -> None:
        DeviceChoice.parse(self.device)
        if self.bits not in BITS:
            raise ParamsError(f"bits is {self.bits!r}; set it to one of: {', '.join(BITS)}")
        if self.kv_memory is not None and (not isinstance(self.kv_memory, int) or self.kv_memory < 1):
            raise ParamsError(f"kv_memory is {self.kv_memory!r}; set it to a number of bytes, or None")
        if self.prefix_dir is not None and not self.prefix_cache:
            raise ParamsError("prefix_dir is set and prefix_cache is off; leave one of them out")
        for name in ("max_batch", "prefill_chunk", "max_queue", "prefix_disk"):
            value = getattr(self, name)
            if (value is not None or name != "prefill_chunk") and (not isinstance(value, int) or value < 1):
                raise ParamsError(f"{name} is {value!r}; set it to an integer >= 1")
