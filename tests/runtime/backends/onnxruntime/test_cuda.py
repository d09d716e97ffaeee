"""The ONNX Runtime backend for GPUs, run over host memory: its own code and the real graphs, with the CPU provider.

Not tested: the CUDA provider's kernels and stream, and overlapping copies.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
import pytest
from runtime.cuda_kernels import CUDA_KERNELS
from runtime.host_device import HostDevice
from runtime.simulated_gpu import SimulatedGpu
from runtime.test_lora import write as write_adapter
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.device import device_target
from tide_runtime.backends.device.element_types import BF16
from tide_runtime.backends.onnxruntime import cuda, cuda_libraries
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend, cuda_provider
from tide_runtime.backends.step_arrays import NO_PADDING
from tide_runtime.bundle import Bundle
from tide_runtime.depth.policy import LoadedPolicy
from tide_runtime.device_loop.driver_choice import capture_steps, choose_driver
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.errors import AdapterError, BundleError, DeviceMemoryError, TargetError

PROMPTS = [[5, 6, 7, 8, 9, 10], [3, 4], [100] * 30, [17, 17, 17]]
PARAMS = GenerationParams(max_new_tokens=24)


@pytest.fixture
def on_device(bundle: Path) -> Iterator[Engine]:
    """An engine with the GPU backend over host memory."""
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu")) as engine:
        backend = load(engine.bundle, HostDevice())
        with Engine(engine.bundle, engine.options, backend=backend) as on_device:
            yield on_device


def load(bundle: Bundle, device: HostDevice) -> OnnxRuntimeCudaBackend:
    backend = OnnxRuntimeCudaBackend.load(bundle, "cuda", ThreadOptions(1), device, ("CPUExecutionProvider", {}))
    backend.min_slots = 16  # of 64: the texts of these tests outgrow them
    backend.row_padding = NO_PADDING  # near ties aside
    return backend


@pytest.fixture(scope="session")
def reference(bundle: Path) -> list[tuple[int, ...]]:
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu")) as engine:
        return [row.token_ids for row in engine.generate(PROMPTS, PARAMS)]


def test_tokens_are_the_cpu_targets(on_device: Engine, reference: list[tuple[int, ...]]) -> None:
    """Guards against wrong lowerings and bindings of the GPU backend."""
    assert [row.token_ids for row in on_device.generate(PROMPTS, PARAMS)] == reference


def test_only_tokens_are_copied_to_the_host(on_device: Engine) -> None:
    """Guards against a copy of the logits, 128k per sequence and token, which costs more than a small model's step."""
    device: HostDevice = on_device.backend.device  # type: ignore[attr-defined]
    on_device.generate(PROMPTS[:1], PARAMS)
    device.downloads.clear()
    device.waits = 0
    [row] = on_device.generate(PROMPTS[:1], PARAMS)
    assert max(device.downloads) <= 8 * 13  # a token id for each of the drafts that a pass verifies, and one more
    assert len(device.downloads) <= len(row.token_ids)


def test_auto_drafts_by_what_passes_take_here(
    on_device: Engine, reference: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ``auto`` that ends in ``full`` on GPUs because nobody measured, and against launches of the measurement that
    count as a request's, or that are timed before the device has run them."""
    costs, device = on_device.backend.pass_costs, on_device.backend.device  # type: ignore[attr-defined]
    assert on_device.policy.name == "exact" and costs is not None
    on_device.backend.launches.clear()
    del on_device.backend.pass_costs  # type: ignore[attr-defined]
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))  # where nobody has measured
    waits = device.waits
    again = on_device.backend.pass_costs
    assert again is not None and not on_device.backend.launches
    assert device.waits - waits >= 2 * len(again.steps)  # a wait for each pass, and for the single tokens before it
    assert on_device.generate(PROMPTS[0], PARAMS)[0].token_ids == reference[0]


@pytest.mark.parametrize("agree", [True, False])
def test_auto_changes_no_text_for_drafts(on_device: Engine, agree: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against drafts as a default where verifying them gives a token other bits than decoding it."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device_target, "launches_agree", lambda *_: agree)
    del on_device.backend.row_padding  # type: ignore[attr-defined]
    with nullcontext() if agree else pytest.warns(RuntimeWarning, match="on the drafts of policy exact"):
        for policy, name in (("auto", "exact" if agree else "full"), ("exact", "exact")):
            with Engine(on_device.bundle, EngineOptions(target="cuda", policy=policy), backend=on_device.backend) as engine:
                assert engine.policy.name == name
    on_device.backend.row_padding = NO_PADDING  # type: ignore[misc]


def test_sampling_sees_the_logits(on_device: Engine, bundle: Path) -> None:
    """Guards against stale or missing logits when a sampler reads them."""
    params = GenerationParams(max_new_tokens=12, temperature=0.7, seed=3, logprobs=2)
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu")) as cpu:
        assert on_device.generate(PROMPTS, params)[1].token_ids == cpu.generate(PROMPTS, params)[1].token_ids


def test_adapters_are_refused(on_device: Engine, tmp_path: Path) -> None:
    """Breaks: requests for an adapter are answered by the model without it."""
    options = EngineOptions(target="cuda", adapters={"a": write_adapter(tmp_path)})
    with pytest.raises(AdapterError, match="target cuda takes no adapters, target cpu does"):
        Engine(on_device.bundle, options, backend=on_device.backend)


@pytest.mark.parametrize("rows", [1.5, 2.5])
def test_requests_wait_where_memory_is_short(bundle: Path, reference: list[tuple[int, ...]], rows: float) -> None:
    """Guards against requests that fail on a small GPU, where fewer at once would fit."""
    device = HostDevice()
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu", policy="full")) as engine:
        backend = load(engine.bundle, device)
        backend.machine_key = []  # nothing is measured, which takes memory
        device.max_reserved = int(rows * engine.manifest.max_seq_len * backend.kv_bytes_per_token)
        with Engine(engine.bundle, engine.options, backend=backend) as short:
            with pytest.warns(RuntimeWarning, match="no memory left; at most . requests run at once from now on"):
                found = [row.token_ids for row in short.generate(PROMPTS, PARAMS)]
            scheduler = short._loop.scheduler
            assert found == reference and scheduler.free_blocks == scheduler.options.blocks


def test_a_text_that_does_not_fit_alone_fails(bundle: Path) -> None:
    """Guards against an engine that computes a request again and again."""
    device = HostDevice()
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu", policy="full")) as engine:
        backend = load(engine.bundle, device)
        backend.machine_key = []  # as above
        device.max_reserved = engine.manifest.max_seq_len * backend.kv_bytes_per_token // 2
        with Engine(engine.bundle, engine.options, backend=backend) as short:
            for _ in range(4):
                with pytest.raises(DeviceMemoryError):
                    short.generate([[5] * 40], PARAMS)
            assert len(short.generate([[5, 6]], GenerationParams(max_new_tokens=4))[0].token_ids) == 4


def test_the_host_drives_it(bundle: Path) -> None:
    """Guards against captures of ONNX Runtime's sessions, one of which was seen to end the process."""
    gpu = SimulatedGpu()
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), target="cpu", policy="full")) as engine:
        gpu.kind = "cpu"  # the name of the device for ONNX Runtime
        backend = load(engine.bundle, gpu)
        gpu.kind = "cuda"
        capture_steps(backend, load_kernels=lambda device: cast(LoopKernels, None))
        drive = choose_driver(cast(LoadedPolicy, engine.policy), backend)
        assert drive.loop is None and "not captured" in str(drive) and backend.step_graphs.refused is not None


def test_non_finite_logits_are_detected_on_the_device(bundle: Path) -> None:
    """Guards against undetected NaN: greedy decoding never copies the logits to the host."""
    step = load(Bundle.open(bundle), HostDevice()).context(1).step(0, [1], [1])
    step.place([0])
    for value, found in ((1.0, True), (np.nan, False)):
        step.hidden[-2][0] = np.full(step.hidden[-2].shape[1], value)
        step.run("segment_2")
        assert (step.token[0] >= 0) == found


def test_every_operator_has_a_kernel_for_cuda(bundle: Path) -> None:
    """Guards against nodes that silently run on the CPU, with copies before and after."""
    files = Bundle.open(bundle).manifest.targets["cuda"].graphs.values()
    used = {(n.domain, n.op_type) for f in files for n in onnx.load(bundle / f, load_external_data=False).graph.node}
    assert used <= CUDA_KERNELS, sorted(used - CUDA_KERNELS)


def test_sessions_refuse_nodes_on_the_processor(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against wrong tokens: such a node would read device addresses on the processor."""
    found: list[onnxruntime.SessionOptions] = []

    def refuse(bundle: Bundle, name: str, file: str, options: onnxruntime.SessionOptions, *others: object) -> None:
        found.append(options)
        raise BundleError("not loaded")

    monkeypatch.setattr(cuda, "load_session", refuse)
    with pytest.raises(BundleError, match="not loaded"):
        OnnxRuntimeCudaBackend.load(Bundle.open(bundle), "cuda", ThreadOptions(1), HostDevice(), (cuda.PROVIDER, {}))
    assert found[0].get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


def test_bf16_is_read_as_numbers() -> None:
    """Guards against sampling from bf16 bits read as integers."""
    assert BF16.widened(np.array([0x3F80, 0xC000, 0x7FC0], np.uint16)).tolist()[:2] == [1.0, -2.0]


def test_an_onnx_runtime_without_cuda_is_named() -> None:
    """Guards against an unclear error when the CPU package, which installs the same module, is present."""
    with pytest.raises(
        TargetError, match="without CUDAExecutionProvider: pip install --force-reinstall --no-deps onnxruntime-gpu"
    ):
        cuda_provider(HostDevice())


def test_missing_cuda_libraries_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an installation without torch or a system CUDA, where ONNX Runtime would quietly take the CPU provider."""
    looked = []
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: looked.append("wheels") or print("Failed to load libcublas.so.13"))
    monkeypatch.setattr(cuda_libraries, "_NEEDED", ("libc.so.6", "libcublas_of_nobody.so.13"))
    with pytest.raises(TargetError, match=r"cannot be loaded \(libcublas_of_nobody.so.13: .*\); pip install 'tide-llm\[cuda\]'"):
        cuda_provider(HostDevice())
    assert looked == ["wheels"] and capsys.readouterr().out == ""


def test_a_provider_that_does_not_start_is_an_error(bundle: Path) -> None:
    """Guards against the CPU provider being given device addresses: ONNX Runtime falls back to it with a warning."""
    opened = Bundle.open(bundle)
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(TargetError, match=r"cannot start CUDAExecutionProvider, .* would run onnx/.* on the processor"),
    ):
        OnnxRuntimeCudaBackend.load(opened, "cuda", ThreadOptions(1), HostDevice(), ("CUDAExecutionProvider", {}))


def test_a_failing_graph_names_itself(on_device: Engine) -> None:
    """Guards against ONNX Runtime errors that do not name the bundle's graph."""
    step = on_device.backend.context(1).step(0, [1])
    step.place([0])
    step.context.backend._options = "none"  # type: ignore[attr-defined]
    with pytest.raises(BundleError, match="cannot run segment_0"):
        step.run("segment_0")
