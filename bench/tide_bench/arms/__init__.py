"""The arms: TIDE's policies and the other ways to run the same model, and what each promises about its text.

Each kind is one file; adding one is one line of `ARMS`.

Importing this imports none of their libraries: each arm lives in a process of its own (see `process`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tide_bench.arms.base import ArmDevice

LoadArm = Callable[[Path, ArmDevice], Any]


def _class(module: str, name: str, only_cpu: bool = False) -> LoadArm:
    """``name(folder, device)`` of ``tide_bench.arms.module``, imported when called; ``name(folder)`` where it is ``only_cpu``."""

    def load(folder: Path, device: ArmDevice) -> Any:
        kind = getattr(import_module(f"tide_bench.arms.{module}"), name)
        return kind(folder) if only_cpu else kind(folder, device)

    return load


OURS, REFERENCE = "tide", "eager"
ARMS: dict[str, LoadArm] = {
    OURS: _class("tide", "TideArm"),
    REFERENCE: _class("eager", "EagerArm"),
    "unsplit": _class("tide", "TideArm"),
    "compile": _class("compiled", "CompileArm"),
    "cuda-graph": _class("cuda_graph", "CudaGraphArm"),
    "genai": _class("genai", "GenaiArm", only_cpu=True),
    "genai-int4": _class("genai", "GenaiArm", only_cpu=True),
    "llamacpp": _class("llamacpp", "LlamacppArm", only_cpu=True),
    "openvino": _class("openvino", "OpenvinoArm", only_cpu=True),
}

Promise = Literal["same", "certified", "rounded"]
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class ArmSpec:
    """One arm of the comparison.

    Args:
        name: on the command line and in result names.
        title: in tables and charts.
        kind: a name of `tide_bench.arms.ARMS`.
        promise: ``same``: the model's own greedy tokens; ``certified``: as often as the bundle's certificate allows; ``rounded``:
            its weights or products have fewer bits, rounded in its own way, so its text may part anywhere.
        options: further arguments of its kind's ``generate``.
        all_layers: True when every token takes all layers.
        model: which of several models of its kind; arms of one kind and model share a process.
        devices: kinds of device that it runs on.
        target: of TIDE's arms: the bundle's target; empty: the best one of those that are compared.
    """

    name: str
    title: str
    kind: str
    promise: Promise
    options: dict[str, Any] = field(default_factory=dict)
    all_layers: bool = False
    model: str = ""
    devices: tuple[str, ...] = (CPU, CUDA)
    target: str = ""

    @property
    def process(self) -> str:
        """The name of its process."""
        return self.model or self.kind


def in_bits(spec: ArmSpec, bits: str) -> ArmSpec:
    """TIDE's arm with the engine's option ``bits``; ``fast`` promises no text."""
    if bits == "same":
        return spec
    return replace(spec, title=f"{spec.title}, bits {bits}", promise="rounded", options=spec.options | {"bits": bits})


def on_target(spec: ArmSpec, target: str) -> ArmSpec:
    """TIDE's arm on another target of the bundle, in a process of its own."""
    return replace(spec, name=f"{target}-{spec.name}", title=title_on(spec, target), model=f"{OURS}-{target}", target=target)


def title_on(spec: ArmSpec, target: str) -> str:
    return spec.title.replace("TIDE", f"TIDE {target}")


def is_ours(process: str) -> bool:
    """Whether the process of this name runs the bundle that is compared."""
    return process == OURS or process.startswith(f"{OURS}-")


POLICIES: dict[str, ArmSpec] = {
    "full": ArmSpec("full", "TIDE full", "tide", "same", {"policy": "full"}),
    "exact": ArmSpec("exact", "TIDE exact", "tide", "same", {"policy": "exact"}),
    "exit": ArmSpec("exit", "TIDE exit", "tide", "certified", {"policy": "exit"}),
}
OTHER_ARMS: dict[str, ArmSpec] = {
    "unsplit": ArmSpec("unsplit", "unsplit ONNX graph", "unsplit", "same"),
    "eager": ArmSpec("eager", "HF eager", "eager", "same", all_layers=True),
    "cuda-graph": ArmSpec("cuda-graph", "HF CUDA graph", "cuda-graph", "same", all_layers=True, devices=(CUDA,)),
    "compile": ArmSpec("compile", "HF torch.compile", "compile", "same", all_layers=True),
    "genai": ArmSpec("genai", "onnxruntime-genai", "genai", "same", all_layers=True, devices=(CPU,)),
    "genai-int4": ArmSpec("genai-int4", "onnxruntime-genai int4", "genai-int4", "rounded", all_layers=True, devices=(CPU,)),
    "llamacpp": ArmSpec("llamacpp", "llama.cpp", "llamacpp", "rounded", all_layers=True, devices=(CPU,)),
    "openvino": ArmSpec("openvino", "OpenVINO GenAI", "openvino", "rounded", all_layers=True, devices=(CPU,)),
    "assisted": ArmSpec("assisted", "HF assistant_early_exit", "eager", "same"),
    # HF's documentation, "Prompt lookup decoding"
    "prompt-lookup": ArmSpec("prompt-lookup", "HF prompt lookup", "eager", "same", {"prompt_lookup_num_tokens": 10}),
}
