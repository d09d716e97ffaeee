"""Selection of a bundle's target by machine, and the error when no target runs."""

import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import onnxruntime
import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime import Engine, EngineOptions
from tide_runtime.backends.onnxruntime import cuda_libraries
from tide_runtime.bundle.architectures import ARCHITECTURES
from tide_runtime.bundle.manifest import Manifest, TargetInfo
from tide_runtime.errors import ParamsError, TargetError
from tide_runtime.targets import target_choice
from tide_runtime.targets.gpu_probe import PresentGpu
from tide_runtime.targets.target_choice import DeviceChoice

from tide_export.targets import TARGETS as EXPORTED

H200, T4 = PresentGpu("NVIDIA H200", 90), PresentGpu("Tesla T4", 75)
TARGETS = {
    "cpu": ("onnxruntime-cpu", []),
    "cuda": ("onnxruntime-cuda", [75, 80, 86, 90, 100, 120]),
    "torch": ("torch", []),
    "rtx-ampere+": ("tensorrt-rtx", [80, 86, 89, 120, 121]),
    "rtx-sm_75": ("tensorrt-rtx", [75]),
    "trt-sm_90": ("tensorrt", [90]),
}


def manifest(*names: str) -> Manifest:
    made = tiny_manifest(TinyTransformer(0, (1.0, 1.0), 5, 8), [1])
    targets = {}
    for name in names:
        backend, compute = TARGETS[name]
        graphs = {graph.name: f"{name}.{graph.name}" for graph in made.graphs}
        targets[name] = TargetInfo(backend, graphs, None, {}, compute)
    files = {file: None for target in targets.values() for file in target.graphs.values()}
    return replace(made, targets=targets, files=files)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with ``gpu`` and Python ``packages``."""

    def be(gpu: PresentGpu | None, *packages: str) -> None:
        monkeypatch.setattr(target_choice, "present_gpu", lambda ordinal: gpu)
        monkeypatch.setattr(target_choice, "missing_cuda_core", lambda: None)
        for name in ("tensorrt", "tensorrt_rtx"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__="1.0") if name in packages else None)  # type: ignore[arg-type]
        providers = ["CPUExecutionProvider", *(["CUDAExecutionProvider"] if "onnxruntime-gpu" in packages else [])]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
        monkeypatch.setattr(cuda_libraries, "missing_cuda_libraries", list)

    return be


def chosen(bundle: Manifest, device: str = "auto") -> str:
    return target_choice.choose_target(bundle, DeviceChoice.parse(device))


def test_the_best_for_the_gpu_present(machine: Callable[..., None]) -> None:
    """Guards against an unused GPU, and against engines for another GPU."""
    everything = manifest(*TARGETS)
    machine(None)
    assert chosen(everything) == "cpu"
    machine(H200, "tensorrt", "tensorrt_rtx", "onnxruntime-gpu")
    assert chosen(everything) == "trt-sm_90"
    assert chosen(everything, "cpu") == "cpu"
    machine(T4, "tensorrt", "tensorrt_rtx", "onnxruntime-gpu")
    assert chosen(everything) == "rtx-sm_75"
    machine(T4, "onnxruntime-gpu")
    assert chosen(everything, "cuda") == "cuda"


def test_torch_is_for_gpus_and_for_who_asks(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against torch on a processor in place of ONNX Runtime, and against a torch without CUDA beside a GPU."""
    machine(None)
    assert chosen(manifest("torch", "cpu")) == "cpu"
    assert chosen(manifest("torch")) == chosen(manifest("torch"), "cpu") == "torch"
    with pytest.raises(TargetError, match=r"torch \(there is no GPU number 0 with a driver"):
        chosen(manifest("torch"), "cuda")
    machine(T4, "onnxruntime-gpu")
    with pytest.raises(TargetError, match="has no CUDA, and here is a Tesla T4"):
        chosen(manifest("torch"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert chosen(manifest("torch", "cuda", "cpu")) == "torch"


def test_an_engine_for_this_gpu_alone_before_a_portable_one(machine: Callable[..., None]) -> None:
    """Guards against portable engines, which are larger and load more slowly, where specific ones exist."""
    both = manifest("cpu", "rtx-ampere+")
    both.targets["rtx-sm_89"] = replace(both.targets["rtx-ampere+"], compute=[89])
    machine(PresentGpu("L4", 89), "tensorrt_rtx")
    assert chosen(both) == "rtx-sm_89"


def test_a_gpu_without_cuda_core_is_passed_over(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a failing load where the processor target runs: the extra for building engines lacks the runtime."""
    machine(T4, "tensorrt_rtx", "onnxruntime-gpu")
    monkeypatch.setattr(
        target_choice, "missing_cuda_core", lambda: "the package cuda-core is not installed; pip install 'tide-llm[kernels]'"
    )
    with pytest.warns(
        RuntimeWarning, match=r"rtx-sm_75: the package cuda-core is not installed; pip install 'tide-llm\[kernels\]'"
    ):
        assert chosen(manifest("cpu", "rtx-sm_75")) == "cpu"


def test_engines_of_another_release_are_passed_over(machine: Callable[..., None]) -> None:
    """Guards against a failing load where another target runs."""
    both = manifest("cpu", "rtx-sm_75")
    both.targets["rtx-sm_75"] = replace(both.targets["rtx-sm_75"], tool="tensorrt-rtx 2.0")
    machine(T4, "tensorrt_rtx")
    with pytest.warns(RuntimeWarning, match="rtx-sm_75: the engines were built by tensorrt-rtx 2.0, here is 1.0"):
        assert chosen(both) == "cpu"


@pytest.mark.parametrize(
    ("processor", "compute", "runs"),
    [
        *(("x86_64", *case) for case in ((70, False), (75, True), (89, True), (90, True), (100, False), (121, True))),
        *(("aarch64", *case) for case in ((87, False), (90, True), (103, False), (110, False), (121, True))),
    ],
)
def test_onnx_runtime_s_machine_code_decides_where_cuda_runs(
    processor: str, compute: int, runs: bool, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a GPU whose first kernel fails to load: a V100, a B200, an Orin. The bundle's own list says sm_100."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    machine(PresentGpu("made-up GPU", compute), "onnxruntime-gpu")
    with nullcontext() if runs else pytest.warns(RuntimeWarning, match="cuda: onnxruntime-gpu has machine code for sm_"):
        assert chosen(manifest("cpu", "cuda")) == ("cuda" if runs else "cpu")


def test_a_b200_is_advised_to_take_its_own_target(machine: Callable[..., None]) -> None:
    """Guards against the advice to export for `cuda`, which has no kernels for it."""
    machine(PresentGpu("B200", 100), "onnxruntime-gpu")
    with pytest.raises(TargetError, match=r"Add a target: tide-export .* --target trt-sm_100 --target torch --dtype"):
        chosen(manifest("cuda"))


def test_missing_cuda_libraries_are_said(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a load that fails, or runs on the CPU provider, where another target would do."""
    machine(H200, "onnxruntime-gpu")
    monkeypatch.setattr(cuda_libraries, "missing_cuda_libraries", lambda: ["libcublas.so.13: cannot open shared object file"])
    with pytest.warns(RuntimeWarning, match=r"cuda: libcublas.so.13: cannot open .*; pip install 'tide-llm\[cuda\]'"):
        assert chosen(manifest("cpu", "cuda")) == "cpu"


def test_the_processor_beside_a_gpu_is_announced(machine: Callable[..., None]) -> None:
    """Guards against a silent fallback to the processor."""
    machine(H200)
    with pytest.warns(
        RuntimeWarning, match="beside a NVIDIA H200: cuda: .*no CUDA provider.*trt-sm_90: .*tensorrt cannot be imported"
    ):
        assert chosen(manifest("cpu", "cuda", "trt-sm_90")) == "cpu"


@pytest.mark.filterwarnings("error")
def test_a_bundle_for_processors_runs_there_without_a_word(machine: Callable[..., None]) -> None:
    """Guards against a warning for bundles that only have a processor target."""
    machine(H200)
    assert chosen(manifest("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("gpu", "names", "device", "words"),
    [
        (None, ("cuda",), "auto", r"cuda \(needs a GPU.*The machine is a processor.*--target cpu"),
        (None, ("cpu", "cuda"), "cuda:1", r"cpu \(runs on the processor\); cuda \(.*no GPU number 1.*--target cuda"),
        (
            T4,
            ("rtx-ampere+", "trt-sm_90"),
            "auto",
            "for sm_80, sm_86.*a Tesla T4, sm_75.*cuda --target rtx-sm_75 --target trt-sm_75 --target torch --dtype fp32",
        ),
        (T4, ("cpu",), "cuda", "runs on the processor.*--target trt-sm_75"),
        (PresentGpu("V100", 70), ("cpu",), "cuda", "a V100, sm_70.*DIR --target trt-sm_70 --target torch --dtype"),
        (H200, ("cpu",), "cuda", "--target cuda --target trt-sm_90 --target torch --dtype"),  # TensorRT-RTX leaves Hopper out
        (PresentGpu("GTX 1080", 61), ("cpu",), "cuda", "no target for this GPU"),
        (H200, ("cuda",), "cpu", r"cuda \(needs a GPU\).*--target cpu --dtype fp32 "),
    ],
)
def test_nothing_fits(
    machine: Callable[..., None], gpu: PresentGpu | None, names: tuple[str, ...], device: str, words: str
) -> None:
    """Guards against an error without the bundle's targets, the machine, or the command that helps."""
    machine(gpu, "tensorrt", "tensorrt_rtx", "onnxruntime-gpu")
    with pytest.raises(TargetError, match=words):
        chosen(manifest(*names), device)


@pytest.mark.parametrize(
    ("gpu", "device", "dtype"), [(None, "auto", "fp32"), (T4, "cuda", "fp16"), (H200, "cuda", "bf16"), (None, "cuda", "bf16")]
)
def test_the_advice_can_be_taken(machine: Callable[..., None], gpu: PresentGpu | None, device: str, dtype: str) -> None:
    """Guards against advice that tide-export refuses: processors and Turing have no bf16."""
    machine(gpu)
    with pytest.raises(TargetError, match=f"--dtype {dtype} "):
        chosen(replace(manifest("cpu" if device == "cuda" else "cuda"), dtype="bf16"), device)


def test_targets_that_are_advised_exist() -> None:
    """Guards against typos in advised target names."""
    names = {name for one in ARCHITECTURES for name in target_choice._targets_for(PresentGpu(one.devices, one.compute))}
    assert names == {name for name in EXPORTED if name not in ("cpu", "rtx-ampere+")}


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cpu:0", "auto:1", ""])
def test_other_devices_are_refused(text: str) -> None:
    """Guards against a mistyped device that selects another one."""
    with pytest.raises(ParamsError, match="set it to auto, cpu, cuda"):
        EngineOptions(device=text)


def test_engines_load_for_a_device(bundle: object, machine: Callable[..., None]) -> None:
    """Guards against an `Engine.load(directory, device=…)` that ignores the device."""
    machine(None)
    assert Engine.load(bundle, device="cpu").target == "cpu"  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="nothing that runs on cuda here"):
        Engine.load(bundle, device="cuda")  # type: ignore[arg-type]
