"""Kernels of one GPU, compiled on first use and loaded once."""

from __future__ import annotations

from threading import Lock
from typing import Any

from tide_runtime.bundle.architectures import Architecture, architecture_for
from tide_runtime.errors import ParamsError, TargetError

from tide_plugins.build.builder import Builder
from tide_plugins.kernels import KERNELS, entry_point
from tide_plugins.launch.driver import Driver
from tide_plugins.plans import LaunchPlan

MIN_CUDA_CONDITIONS = 13  # kernels for older GPUs are compiled by CUDA 12, without graph conditions
_MAX_BLOCKS = (2**31 - 1, 65535, 65535)  # grid limits of every GPU


class KernelLibrary:
    """Entry points for the GPU of ``driver``. Threads may share a library.

    Args:
        driver: the GPU.
        builder: provides the images; default: compiled on first use, with the user's cache.

    Raises:
        TargetError: no image runs on this GPU.
    """

    def __init__(self, driver: Driver, builder: Builder | None = None) -> None:
        self.driver = driver
        self.architecture: Architecture = architecture_for(driver.compute)
        self._builder = builder or Builder()
        self._entries: dict[str, Any] = {}
        older = self.architecture.cuda < MIN_CUDA_CONDITIONS
        self._conditions_refused = f"kernels for {self.architecture.name} set no graph conditions" if older else None
        self._lock = Lock()

    @property
    def conditions_refused(self) -> str | None:
        """Reason why kernels cannot set CUDA graph conditions, or None; a driver's refusal is known once a kernel is loaded."""
        return self._conditions_refused

    def entry(self, kernel: str, form: str, dtype: str, plan: LaunchPlan) -> Any:
        """The entry point of ``form`` in ``kernel``'s file, ready for ``plan``.

        Raises:
            ParamsError: the plan has more blocks than a grid holds.
            TargetError, CompilationError: it cannot be built.
        """
        if any(blocks > most for blocks, most in zip(plan.grid, _MAX_BLOCKS, strict=True)):
            raise ParamsError(f"{form} would need a grid of {plan.grid}; the most is {_MAX_BLOCKS}: pass fewer rows at once")
        with self._lock:
            symbol = entry_point(form, dtype)
            if symbol not in self._entries:
                self._entries[symbol] = self._load(kernel, symbol)
            return self._entries[symbol]

    def _load(self, name: str, symbol: str) -> Any:
        [kernel] = (kernel for kernel in KERNELS if kernel.name == name)
        built = self._builder.build(kernel, self.architecture, self._conditions_refused is None)
        try:
            return self.driver.load(built.image.content, self.architecture.ptx, symbol)
        except TargetError as error:
            if self._conditions_refused is not None:
                raise
            # The driver may lack the function that sets graph conditions, to which only some kernels refer.
            built = self._builder.build(kernel, self.architecture, False)
            entry = self.driver.load(built.image.content, self.architecture.ptx, symbol)
            self._conditions_refused = f"{error}; loaded without graph conditions"
            return entry
