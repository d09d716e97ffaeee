"""What the backends of all devices have in common towards the engine."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Self, cast

from tide_runtime.backends.base import ExecutionContext, uncounted
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceBackend, DeviceContext
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, ElementType
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.kv_caches import kv_bytes_per_token
from tide_runtime.backends.launch_bits import TEXT_TOKENS, launches_agree
from tide_runtime.backends.pass_costs import kept_pass_costs
from tide_runtime.backends.step_arrays import NO_PADDING, RowPadding
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import DRAFT, UNCUT, Manifest
from tide_runtime.errors import AdapterError, DeviceMemoryError
from tide_runtime.lora import LoraAdapter
from tide_runtime.machine_cache import kept_result
from tide_runtime.sampler import RowSampling


class DeviceTarget:
    """The part of `Backend` that does not depend on what runs the graphs.

    Attributes:
        machine_key: what measurements depend on, see `machine_key`; empty: nothing is measured.
        step_graphs: how its contexts capture steps, see `device_loop.driver_choice`.
    """

    packs_steps, has_prefix_blocks = False, False
    bits_key: Sequence[str] = ()
    state_bytes = 0  # models with recurrent layers are refused
    loop_costs = None
    private_weights = ""
    machine_key: Sequence[str] = ()
    step_graphs = StepGraphs(None)
    row_sampling: RowSampling | None = None
    manifest: Manifest
    target: str
    device: Device
    element: ElementType
    layers: dict[str, int]
    launches: dict[str, int]

    @property
    def cache_element(self) -> ElementType:
        return ELEMENT_TYPES[self.manifest.cache_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        caches = self.manifest.caches if DRAFT in self.layers else self.manifest.kv
        return kv_bytes_per_token(caches, self.cache_element.bytes)

    def with_bits(self, bits: str) -> Self:
        return self

    def with_adapters(self, adapters: Sequence[LoraAdapter]) -> Self:
        raise AdapterError(f"target {self.target} takes no adapters, target cpu does; set target to cpu")

    def without_draft_head(self) -> Self:
        return self

    def context(self, capacity: int, prefix_blocks: int = 0) -> ExecutionContext:
        # Step arrays are views of device memory.
        return cast(ExecutionContext, DeviceContext(cast(DeviceBackend, self), capacity))

    def takes(self, rows: int, tokens: int) -> bool:
        """Whether a step of ``rows`` sequences of ``tokens`` tokens can be run."""
        return True

    @cached_property
    def row_padding(self) -> RowPadding | None:
        """See `Backend`. No padding is tried on devices: `NO_PADDING` where launches agree without, else None."""
        model = self.manifest.model
        segments = [segment.name for segment in self.manifest.segments]
        chains = [[UNCUT], segments] if UNCUT in self.layers else [segments]

        def measure() -> bool:
            return launches_agree(self.context, chains, model.vocab_size, self.manifest.max_seq_len, self.takes)

        if not self.machine_key:
            return NO_PADDING
        with uncounted(self.launches):
            agree = kept_result("launch-bits", [*self.machine_key, str(TEXT_TOKENS)], measure, bool, _answer)
        return NO_PADDING if agree else None

    @cached_property
    def pass_costs(self) -> CostTable | None:
        """See `Backend`. None, with a warning, where the device has no memory for the rows of the measurement."""
        if not self.machine_key:
            return None
        try:
            with uncounted(self.launches):
                return kept_pass_costs(
                    self.machine_key, self.context, self.manifest.max_seq_len, self.target, self.takes, captured=True
                )
        except DeviceMemoryError as error:
            warnings.warn(f"passes are not measured, so that policy auto drafts nothing: {error}", RuntimeWarning, stacklevel=2)
            return None


def _answer(kept: object) -> bool:
    if not isinstance(kept, bool):
        raise ValueError(f"{kept!r} is neither true nor false")
    return kept


def machine_key(bundle: Bundle, target: str, device_name: str, library: str) -> list[str]:
    """What measurements of ``target`` depend on: its files, the device, and the ``library`` that runs them, with its version."""
    info = bundle.manifest.targets[target]
    files = bundle.manifest.files
    used = sorted(file for file in {info.weights, *info.graphs.values()} if file is not None)
    return [platform.node(), device_name, library, *(files[file].sha256 for file in used if file in files)]
