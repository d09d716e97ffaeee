"""Which device a comparison runs on, and which of the bundle's targets run there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu
from tide_runtime.targets.target_choice import AUTO, CPU, CUDA, DeviceChoice, choose_target, obstacle

from tide_bench.arms.base import ArmDevice


@dataclass(frozen=True)
class BenchDevice:
    """The device of all arms.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1``.
        targets: of the bundle, that are compared, the best one first.
        dtype: of the arms that load the HuggingFace model. A processor computes in fp32, whatever the bundle stores.
        gpu: what the driver calls it; empty for the processor.
    """

    name: str
    targets: tuple[str, ...]
    dtype: str = "fp32"
    gpu: str = ""

    @property
    def kind(self) -> str:
        return self.choice.kind

    @property
    def choice(self) -> DeviceChoice:
        return DeviceChoice.parse(self.name)

    @property
    def of_arms(self) -> ArmDevice:
        return ArmDevice(self.name, self.dtype, self.targets[0])


def choose_device(manifest: Manifest, asked: str = AUTO, targets: Sequence[str] = ()) -> BenchDevice:
    """The device ``asked`` for, with those of ``targets`` (empty: of the bundle's targets) that run on it.

    Args:
        asked: as `EngineOptions.device`; ``auto`` is the GPU where there is one.

    Raises:
        ParamsError: no such device.
        TargetError: there is no such GPU; none of the bundle's targets runs on it, or one that ``targets`` names does not. The
            message lists what the bundle has, and the command that adds a target.
    """
    choice = DeviceChoice.parse(asked)
    gpu = present_gpu(choice.ordinal) if choice.kind != CPU else None
    given = asked
    if choice.kind == AUTO:
        choice, asked = (DeviceChoice(CUDA), CUDA) if gpu is not None else (DeviceChoice(CPU), CPU)
    try:
        best = choose_target(manifest, choice)
    except TargetError as error:
        elsewhere = "; or compare on the processor with --device cpu" if given == AUTO and asked == CUDA else ""
        raise TargetError(f"{error}{elsewhere}") from error
    obstacles = {name: obstacle(target, choice, gpu) for name, target in manifest.targets.items()}
    for name in targets:
        if name not in obstacles:
            raise TargetError(f"--target has {name}; the bundle has: {', '.join(obstacles)}; {_adding(manifest, name)}")
        if (why := obstacles[name]) is not None:
            raise TargetError(f"target {name} does not run on {asked}: {why}")
    fitting = tuple(targets) or (best, *(name for name, why in obstacles.items() if why is None and name != best))
    return BenchDevice(asked, fitting, manifest.dtype if gpu is not None else "fp32", gpu.name if gpu is not None else "")


def _adding(manifest: Manifest, target: str) -> str:
    return f"add it: tide-export {manifest.model.source} --out DIR --target {target} --dtype {manifest.dtype}"
