"""GPU architectures that kernels are compiled for, and the image that a given GPU loads.

A cubin runs on GPUs of its own major compute capability whose minor one is the same or higher; PTX is compiled by the driver
for any GPU from its architecture on (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility").
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class Architecture:
    """One compilation target.

    Args:
        compute: compute capability times ten, as CUDA writes it: 90 is 9.0.
        cuda: the major version of the CUDA release whose NVRTC compiles it.
        devices: product names of the GPUs that have it.
        rtx: whether TensorRT-RTX 1.7 compiles for it: not for Volta, Hopper and data-center Blackwell.
        ptx: PTX for this virtual architecture instead of a cubin for the real one.
    """

    compute: int
    cuda: int
    devices: str
    rtx: bool = False
    ptx: bool = False

    @property
    def name(self) -> str:
        """The value of ``--gpu-architecture``: ``sm_90`` for a cubin, ``compute_121`` for PTX."""
        return f"{'compute' if self.ptx else 'sm'}_{self.compute}"

    @property
    def suffix(self) -> str:
        """The file name extension of the image."""
        return "ptx" if self.ptx else "cubin"

    @property
    def has_bf16(self) -> bool:
        """Whether the GPU supports bf16, as all from Ampere on."""
        return self.compute >= 80

    def runs_on(self, compute: int) -> bool:
        """Whether a GPU of capability ``compute`` (times ten) can load the image."""
        if self.ptx:
            return compute >= self.compute
        return compute // 10 == self.compute // 10 and compute >= self.compute


# CUDA 13 dropped Volta; 12.9 is the last release that compiles for it.
ARCHITECTURES = (
    Architecture(70, 12, "V100"),
    Architecture(75, 13, "T4, RTX 20", rtx=True),
    Architecture(80, 13, "A100, A30", rtx=True),
    Architecture(86, 13, "A10, A40, RTX 30", rtx=True),
    Architecture(87, 13, "Jetson Orin"),
    Architecture(89, 13, "L4, L40, RTX 40", rtx=True),
    Architecture(90, 13, "H100, H200, GH200"),
    Architecture(100, 13, "B200, GB200"),
    Architecture(103, 13, "B300, GB300"),
    Architecture(110, 13, "Jetson Thor"),
    Architecture(120, 13, "RTX 50, RTX PRO Blackwell", rtx=True),
    Architecture(121, 13, "GB10 (DGX Spark)", rtx=True),
    Architecture(121, 13, "what comes after", ptx=True),
)


# Machine code in the CUDA provider of onnxruntime-gpu 1.31.1 from PyPI, by processor: `cuobjdump --list-elf` of the wheels. They
# have no PTX (`--list-ptx`), which the driver could compile for other GPUs.
ONNXRUNTIME_COMPUTE: Mapping[str, tuple[int, ...]] = {"x86_64": (75, 80, 86, 89, 90, 120), "aarch64": (89, 90, 120, 121)}


def onnxruntime_compute() -> tuple[int, ...]:
    """Compute capabilities, times ten, that the CUDA provider of ONNX Runtime is compiled for on this machine's processor."""
    return ONNXRUNTIME_COMPUTE.get(platform.machine(), ONNXRUNTIME_COMPUTE["x86_64"])


def architectures(names: str) -> tuple[Architecture, ...]:
    """The architectures of a comma-separated list of names, or of ``all``, in the table's order.

    Raises:
        TargetError: a name is not in the table.
    """
    if names == "all":
        return ARCHITECTURES
    wanted = {name.strip() for name in names.split(",")}
    known = {architecture.name for architecture in ARCHITECTURES}
    if unknown := sorted(wanted - known):
        raise TargetError(f"architecture {', '.join(unknown)} is not supported; choose all, or some of {_listed(ARCHITECTURES)}")
    return tuple(architecture for architecture in ARCHITECTURES if architecture.name in wanted)


def architecture_for(compute: int) -> Architecture:
    """The best image for a GPU of capability ``compute`` (times ten): its own, or the nearest older one that it can load.

    Raises:
        TargetError: no image runs on this GPU.
    """
    usable = [architecture for architecture in ARCHITECTURES if architecture.runs_on(compute)]
    if not usable:
        raise TargetError(
            f"no kernel image runs on a GPU of compute capability {compute // 10}.{compute % 10}; "
            f"there are images for {_listed(ARCHITECTURES)}"
        )
    return max(usable, key=lambda architecture: (not architecture.ptx, architecture.compute))


def _listed(some: Iterable[Architecture]) -> str:
    return ", ".join(architecture.name for architecture in some)
