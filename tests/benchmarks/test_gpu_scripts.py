"""The scripts for a GPU on a machine without one: their output, and everything they do up to the launch."""

from __future__ import annotations

import ctypes
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from plugins.host_driver import HostDriver
from plugins.launch_case import EMPTY_KERNELS
from tide_plugins.build import builder
from tide_plugins.conformance import Case, CaseSpec, cases
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.errors import TargetError
from typer.testing import CliRunner, Result

from benchmarks.gpu import kernel_cases, sanitize
from benchmarks.gpu.device_copy import DeviceCopy

ROOT = Path(__file__).parents[2]


class HostGpu:
    """A `Gpu` whose device memory is separate host memory."""

    def __init__(self) -> None:
        self.driver = HostDriver()
        self._memory: dict[int, Any] = {}

    def allocate(self, count_bytes: int) -> int:
        memory = np.full(count_bytes + 256, 0xAA, np.uint8)  # detects missing uploads
        pointer = memory.ctypes.data + -memory.ctypes.data % 256
        self._memory[pointer] = memory
        return pointer

    def upload(self, pointer: int, source: np.ndarray) -> None:
        ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, pointer: int) -> None:
        ctypes.memmove(target.ctypes.data, pointer, target.nbytes)

    def synchronize(self) -> None:
        pass

    def free_all(self) -> None:
        self._memory.clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide an existing GPU, and use kernels that compile quickly."""

    def refuse(self: CudaDriver, device: int = 0) -> None:
        raise TargetError(f"GPU {device} cannot be used: there is none in this test")

    monkeypatch.setattr(CudaDriver, "__init__", refuse)
    monkeypatch.setattr(builder, "sources", lambda: EMPTY_KERNELS)
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))


def _run(main: Callable[..., None], *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


# --- output


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cases_are_prepared_and_reported_as_not_run() -> None:
    """Guards against a check that did not run but reports success."""
    done = _run(kernel_cases.main, "--only", "exit_gate", "--arch", "sm_120")
    count = sum(spec.kernel == "exit_gate" for spec in cases())
    assert done.exit_code == 2
    assert "NOT RUN: GPU 0 cannot be used" in done.stderr
    assert f"{count} cases were prepared for sm_120 up to the launch; none was launched" in done.stderr


# --- copies to the device and back


def test_copies_keep_strides_offsets_and_sharing() -> None:
    """Guards against copies that lose row padding or shared memory, which cases test."""
    owner = np.arange(60, dtype=np.float32)
    rows = owner[3:].reshape(-1, 19)[:, :8]
    tensors: dict[str, Any] = {"rows": rows, "same": rows, "last": owner[59:], "empty": np.empty((0, 4), np.float16)}
    gpu = HostGpu()
    copy = DeviceCopy(gpu, tensors)
    copy.upload()
    arrays = copy.arrays
    assert arrays["rows"].strides == (19, 1) and arrays["same"].pointer == arrays["rows"].pointer
    assert arrays["last"].pointer - arrays["rows"].pointer == 56 * 4
    ctypes.memmove(arrays["rows"].pointer + 19 * 4, np.full(1, -1, np.float32).ctypes.data, 4)
    back = copy.download()
    assert back["rows"][1, 0] == back["same"][1, 0] == -1 and rows[1, 0] == 22
    back["rows"][1, 0] = 22
    assert {name: array.tobytes() for name, array in back.items()} == {name: a.tobytes() for name, a in tensors.items()}


def _spread(kernel: str, count: int) -> list[CaseSpec]:
    found = [spec for spec in cases() if spec.kernel == kernel]
    return found[:: len(found) // count]


@pytest.mark.parametrize("kernel", ["exit_router", "exit_score", "take_tokens"])
def test_cases_pass_on_a_device_of_its_own_memory(kernel: str) -> None:
    """Guards against errors in upload, launch, download and check, with kernels run on the host."""
    gpu: Any = HostGpu()
    assert kernel_cases.run_all(_spread(kernel, 8), gpu.driver.kernels(), gpu, repeats=2) == {}


def test_a_wrong_result_and_a_changing_result_are_reported() -> None:
    """Guards against a harness that cannot fail."""
    gpu: Any = HostGpu()
    spec = _spread("take_tokens", 1)[0]
    wrong = replace(spec, build=lambda: replace(spec.build(), check=_disagree))
    [message] = kernel_cases.run_all([wrong], gpu.driver.kernels(), gpu, repeats=1).values()
    assert message == "not what was expected"
    case, calls = spec.build(), iter(range(100))

    def drifting(*arguments: Any, **more: Any) -> Any:
        prepared = case.prepare(*arguments, **more)
        running = more["running"].pointer

        class Drifting:
            def enqueue(self, stream: Any) -> None:
                prepared.enqueue(stream)
                ctypes.memset(running, 1 if next(calls) == 2 else 0, 1)

        return Drifting()

    unstable = Case(drifting, case.tensors, case.numbers, lambda _: None)
    with pytest.raises(AssertionError, match="running of repetition 2 differs from the first"):
        kernel_cases.run_case(unstable, gpu.driver.kernels(), gpu, repeats=5)


def _disagree(_tensors: Any) -> None:
    raise AssertionError("not what was expected")


def test_a_case_that_raises_anything_costs_only_itself() -> None:
    """Guards against one kernel that cannot be loaded, whose TargetError ended all 600 cases."""
    gpu: Any = HostGpu()
    good, other = _spread("take_tokens", 2)[:2]

    def refuse() -> Case:
        raise TargetError("GPU 0 cannot load tide_take_tokens_f32: unresolved symbol")

    failures = kernel_cases.run_all([replace(good, build=refuse), other], gpu.driver.kernels(), gpu, repeats=1)
    assert failures == {f"{good.kernel} {good.name}": "TargetError: GPU 0 cannot load tide_take_tokens_f32: unresolved symbol"}


def test_a_selection_has_cases_of_every_kernel() -> None:
    """Guards against sanitizers that see one kernel only, or all 600 cases, for which no time is."""
    every = list(cases())
    some = kernel_cases.spread(every, 3)
    assert {spec.kernel for spec in some} == {spec.kernel for spec in every}
    assert max(sum(spec.kernel == kernel for spec in some) for kernel in {spec.kernel for spec in some}) <= 3
    assert kernel_cases.spread(every, 0) == every


# --- sanitizers

_RACE_INFO = "========= Info: Race reported between Write access at exit_gate and Write access (same value)"
_RACE_ERROR = "========= Error: Race reported between Read access at 0x40 and Write access"


@pytest.mark.parametrize(
    ("exit_code", "log", "verdict", "severities"),
    [
        (0, _RACE_INFO, "clean", {"Error": 0, "Warning": 0, "Info": 1}),
        (99, _RACE_ERROR, "errors", {"Error": 1, "Warning": 0, "Info": 0}),
        (1, "", "broken", {"Error": 0, "Warning": 0, "Info": 0}),
        (1, "========= Error: Device not supported. Please refer to the list", "refused", None),
    ],
)
def test_a_sanitizers_findings_are_told_from_its_programs_failures(
    exit_code: int, log: str, verdict: str, severities: dict[str, int] | None
) -> None:
    """Guards against races that count as failed programs, machines that sanitizers refuse that count as races, and writes of the
    same value, which racecheck grades INFO, that count as errors."""
    run = sanitize.judged("racecheck", exit_code, log, output="")
    assert run.verdict == verdict and (severities is None or run.severities == severities)


def test_a_sanitizer_runs_the_cases_and_leaves_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a tool that is started without its own options, or whose output is lost."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "$@"\nwhile [ "$1" != --log-file ]; do shift; done\necho "========= clean" >"$2"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = sanitize.run_tool("memcheck", tmp_path / "logs")
    assert run.verdict == "clean" and run.summary == ["========= clean"]
    command = sanitize.command("racecheck", tmp_path, most=4)
    assert "--racecheck-report" in command and command[-2:] == ["--most", "4"]
    assert (
        command[command.index("--launch-timeout") + 1] == "0"
    )  # the default ends the tool before Python has imported everything
    memcheck = sanitize.command("memcheck", tmp_path, most=4)
    assert memcheck[memcheck.index("--report-api-errors") + 1] == "no"  # cuda.core asks for calls that older drivers lack


def test_the_make_target_is_the_kit() -> None:
    """Guards against a `make gpu-check` that needs a registry, or in which one red check ends the rest."""
    done = subprocess.run(["make", "--dry-run", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install" not in done.stdout and "-m benchmarks.gpu.kit --plan short" in done.stdout
