"""Selection of an export's targets: by name, by machine, and the reasons for refused ones."""

import sys

import pytest
from tide_runtime.backends.tensorrt.package import TensorRTPackage
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.targets import TARGETS, choice
from tide_export.targets.choice import COLUMNS, buildable, choose_targets, target_row


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """``gpu(compute)``: fake the present GPU; None, the initial state, for no GPU."""

    def put(compute: int | None) -> None:
        found = None if compute is None else PresentGpu("stub GPU", compute)
        for module in (choice, *{sys.modules[type(t.builder).__module__] for t in TARGETS.values()}):
            monkeypatch.setattr(module, "present_gpu", lambda: found, raising=False)

    put(None)
    return put


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """``packages(name, …)``: the TensorRTs that are installed."""

    def install(*modules: str) -> None:
        def load(package: TensorRTPackage) -> None:
            if package.module not in modules:
                raise TargetError(f"{package.title} is not installed; {package.pip}")

        monkeypatch.setattr(TensorRTPackage, "load", load)

    install()
    return install


def names(wanted: list[str], dtype: str = "fp16") -> list[str]:
    return [target.name for target in choose_targets(wanted, dtype)[0]]


def test_auto_is_the_processor_where_there_is_no_gpu(gpu, packages):
    """The default export would do something else on a laptop, or fail there."""
    packages("tensorrt_rtx")
    assert names(["auto"]) == ["cpu"]


def test_auto_takes_what_fits_the_gpu(gpu, packages):
    """Engines for other GPUs would be built, or none for the one that is there."""
    packages("tensorrt_rtx")
    gpu(89)
    assert names(["auto"]) == ["cpu", "cuda", "torch", "rtx-sm_89"]
    gpu(90)
    assert names(["auto"]) == ["cpu", "cuda", "torch"]
    gpu(87)  # runs sm_80's binaries, for which ONNX Runtime is built
    assert names(["auto"]) == ["cpu", "cuda", "torch"]
    gpu(70)
    assert names(["auto"]) == ["cpu", "torch"]
    gpu(61)
    assert names(["auto"]) == ["cpu"]


def test_all_is_what_this_machine_can_build(gpu, packages):
    """--target all would include targets that need an absent GPU, or that lack the precision."""
    assert names(["all"]) == ["cpu", "cuda", "torch"]
    packages("tensorrt_rtx")
    rtx = [f"rtx-sm_{number}" for number in (75, 80, 86, 89, 120, 121)]
    assert names(["all"]) == ["cpu", "cuda", "torch", *rtx, "rtx-ampere+"]
    assert names(["all"], "bf16") == ["cuda", "torch", *rtx[1:], "rtx-ampere+"]


def test_what_cannot_be_built_is_left_out_with_the_reason(gpu, packages):
    """One target without its package would spoil the bundle of the others."""
    chosen, refused = choose_targets(["rtx-sm_89", "cpu", "trt-sm_90", "cpu"], "fp16")
    assert [target.name for target in chosen] == ["cpu"]
    assert set(refused) == {"rtx-sm_89", "trt-sm_90"}
    assert "pip install 'tide-llm[rtx]'" in str(refused["rtx-sm_89"])


def test_nothing_to_build_names_what_can_be(gpu, packages):
    """The user would not learn what to install, or what would work as it is."""
    with pytest.raises(TargetError, match=r"pip install 'tide-llm\[rtx\]'.*Here can be built in fp16: cpu, cuda"):
        choose_targets(["rtx-sm_89"], "fp16")
    packages("tensorrt_rtx")
    with pytest.raises(TargetError, match="target rtx-sm_75 has no bf16 kernels; use --dtype fp32 or fp16"):
        choose_targets(["rtx-sm_75"], "bf16")


def test_int8_caches_are_for_targets_that_have_them(gpu, packages):
    """Caches in int8 would be handed to kernels that read floats, or --target auto would fail beside a GPU."""
    chosen, refused = choose_targets(["cuda", "cpu"], "fp16", "int8")
    assert [target.name for target in chosen] == ["cpu"]
    assert "leave out --kv int8, or compile for: cpu, torch" in str(refused["cuda"])
    with pytest.raises(TargetError, match=r"target cuda has no attention over int8 KV caches.*Here can be built in fp16: cpu"):
        choose_targets(["cuda"], "fp16", "int8")
    gpu(90)
    for every in ("auto", "all"):
        assert [target.name for target in choose_targets([every], "fp16", "int8")[0]] == ["cpu", "torch"]


def test_a_mistyped_target_stops_at_once(gpu, packages):
    """A typo would be reported after minutes of work for the other targets."""
    with pytest.raises(TargetError, match="no target 'rtx-sm_90'; choose from: cpu, cuda, torch, rtx-sm_75"):
        choose_targets(["cpu", "rtx-sm_90"], "fp16")


def test_the_table_says_what_can_be_built_here(gpu, packages):
    """--list-targets would promise what fails, or hide what works."""
    here = {name: dict(zip(COLUMNS, target_row(target), strict=True)) for name, target in TARGETS.items()}
    assert {name for name, row in here.items() if row["here"] == "yes"} == set(buildable("fp16")) == {"cpu", "cuda", "torch"}
    assert here["trt-sm_70"]["backend"] == "TensorRT 10.4" and here["trt-sm_70"]["CUDA"] == "12"
    bits = {name: row["low bits"] for name, row in here.items()}
    assert (bits["cpu"], bits["cuda"], bits["rtx-ampere+"]) == ("int4, int8", "int4, int8", "int4")
    assert (bits["rtx-sm_75"], bits["trt-sm_70"], bits["trt-sm_75"], bits["trt-sm_90"]) == ("–", "–", "–", "int4")
    assert here["rtx-ampere+"]["compute capability"] == "8.0, 8.6, 8.9, 12.0, 12.1"
    outside = {name for name, row in here.items() if "outside NVIDIA's support matrix" in " ".join(row.values())}
    assert outside == {"rtx-sm_80", "rtx-ampere+"}
