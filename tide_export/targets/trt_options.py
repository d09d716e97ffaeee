"""What the user may ask of TensorRT engines: to run on other GPUs, under other releases, or to leave their weights out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.architectures import ARCHITECTURES
from tide_runtime.errors import TargetError

_AMPERE = 80


@dataclass(frozen=True)
class TrtOptions:
    """Args:
    hardware_compatible: engines built on Ampere or newer run on all of those. Otherwise TensorRT promises no more than the
        model of GPU that they were built on.
    version_compatible: later releases of the same major version load the engines.
    strip_weights: engines without the model's weights, which lie beside them and are put in when they are loaded.
    """

    hardware_compatible: bool = False
    version_compatible: bool = False
    strip_weights: bool = False

    def check(self, compute: int) -> None:
        """Raise TargetError for what TensorRT does not offer for GPUs of capability ``compute`` (times ten)."""
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
    def asked(self) -> list[str]:
        """As on the command line: ``--version-compatible``, …"""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value]

    def __str__(self) -> str:
        """As the engines' tool says it: empty, or `, version-compatible`, …"""
        return "".join(f", {name.removeprefix('--')}" for name in self.asked)
