"""How an engine runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import ParamsError
from tide_runtime.targets.select import DeviceChoice


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Defaults suit embedding in a service.

    Args:
        target: which target of the bundle; ``auto`` takes the best one for ``device``.
        policy: depth policy: ``full``, ``exact``, ``exit``, or ``auto``: what the calibration recommends, else ``full``.
        depth: options of the policies that skip layers.
        max_batch: sequences that run at once, fewer where engines were built for fewer; more prompts wait for a free slot.
        prefill_chunk: prompt tokens per prefill step.
        threads: ONNX Runtime's threads (see `ThreadOptions`).
        verify: compare the bundle's files with their SHA-256 when loading.
        device: ``auto`` (the GPU where the bundle has a target for it, else the processor), ``cpu``, ``cuda``, ``cuda:1``.
    """

    target: str = "auto"
    policy: str = "auto"
    depth: DepthOptions = field(default_factory=DepthOptions)
    max_batch: int = 16
    prefill_chunk: int = 256
    threads: ThreadOptions = field(default_factory=ThreadOptions)
    verify: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        DeviceChoice.parse(self.device)
        for name in ("max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParamsError(f"{name} is {value!r}; set it to an integer >= 1")
