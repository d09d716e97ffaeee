"""TensorRT: engines built on a GPU of the kind that runs them, V100 (TensorRT 10.4, the last release for it) to Blackwell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tide_plugins.architectures import ARCHITECTURES, Architecture
from tide_runtime.errors import TargetError
from tide_runtime.manifest import TargetInfo

from .base import BuildJob, Machine, Target
from .trt_sm_70 import PIECES, WHOLE

if TYPE_CHECKING:
    from tide_export.lower import LoweredModel


class TrtEngines:
    """Not there yet: refuses every target."""

    def check(self, target: Target) -> None:
        raise TargetError(
            f"{target.name} is built on a GPU of compute capability {target.machine.compute[0] / 10} with "
            f"{target.machine.backend} (pip install 'tide-llm[tensorrt]'), which this version of tide-export cannot do yet"
        )

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        raise NotImplementedError


def _target(architecture: Architecture) -> Target:
    volta = architecture.compute == 70
    return Target(
        name=f"trt-sm_{architecture.compute}",
        backend="tensorrt",
        dtypes=("fp32", "fp16") if architecture.compute < 80 else ("fp32", "fp16", "bf16"),
        machine=Machine(
            compute=(architecture.compute,),
            examples=architecture.devices,
            backend="TensorRT 10.4" if volta else "TensorRT 11",
            cuda="12" if volta else "13",
            built="on such a GPU",
            attention="decomposed" if volta else "fused; decomposed in fp32 and with soft-cap",
        ),
        builder=TrtEngines(),
        whole=WHOLE,
        pieces=PIECES,
    )


TRT_TARGETS = tuple(_target(architecture) for architecture in ARCHITECTURES if not architecture.ptx)
