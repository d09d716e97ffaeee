"""The target that a calibration times steps and policies on; what cannot be timed here is refused before anything is trained."""

from __future__ import annotations

from tide_runtime.errors import TargetError

from tide_export.targets.choice import AUTO, checked, for_present_gpu, why_not_here

CPU = "cpu"


def measured_target(dtype: str, wanted: str = AUTO, mixed: str = "", gpu_first: bool = False) -> str:
    """``wanted``, or for ``auto`` the first that runs here of ``cpu`` and the targets of the GPU that is present.

    onnxruntime-gpu may be older than what ``cpu`` needs; costs are then the GPU's, on which the bundle will run.

    Args:
        mixed: `LoadedModel.target_restriction`.
        gpu_first: the GPU's targets before ``cpu``.

    Raises TargetError, with the reason for each target, where none with ``dtype`` kernels can be built and run here.
    """
    of_gpu = for_present_gpu(dtype, mixed=mixed)
    reasons = []
    for name in ([*of_gpu, CPU] if gpu_first else [CPU, *of_gpu]) if wanted == AUTO else [wanted]:
        try:
            reason = why_not_here(checked(name, dtype, mixed=mixed))
        except TargetError as error:
            reason = str(error)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise TargetError(
        f"no step can be timed here in {dtype}: {'; '.join(reasons)}. Give --costs none, or the costs.json of a calibration on "
        "the target; tide-doctor shows what each target lacks here"
    )
