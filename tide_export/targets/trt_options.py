"""Options of TensorRT engines: portability to other GPUs and releases, and stripped weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.architectures import ARCHITECTURES
from tide_runtime.errors import TargetError

_AMPERE = 80


@dataclass(frozen=True)
class TrtOptions:
    """Options of TensorRT engines.

    Args:
        hardware_compatible: engines built on Ampere or newer run on every GPU from Ampere on. Otherwise TensorRT supports
            only the GPU model that they were built on.
        version_compatible: later releases of the same major version load the engines.
        strip_weights: engines without weights; the runtime refits them at load from files beside them.
    """

    hardware_compatible: bool = False
    version_compatible: bool = False
    strip_weights: bool = False

    def check(self, compute: int) -> None:
        """Raise TargetError for options that TensorRT does not support on GPUs of capability ``compute`` (times ten)."""
        if self.hardware_compatible and compute < _AMPERE:
            raise TargetError(f"--hardware-compatible engines need Ampere or newer; leave it out for trt-sm_{compute}")

    def configure(self, trt: Any, config: Any) -> None:
        """Set the options on a builder configuration of module ``trt``."""
        if self.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        if self.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if self.strip_weights:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)

    def runs_on(self, compute: int) -> list[int]:
        """The capabilities of the GPUs that an engine built on ``compute`` runs on."""
        if not self.hardware_compatible:
            return [compute]
        return [one.compute for one in ARCHITECTURES if one.compute >= _AMPERE and not one.ptx]

    @property
    def flags(self) -> list[str]:
        """The options that are set, as command-line flags: ``--version-compatible``, …"""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value]

    def __str__(self) -> str:
        """Suffix of the engines' tool in the manifest: empty, or `, version-compatible`, …"""
        return "".join(f", {name.removeprefix('--')}" for name in self.flags)
