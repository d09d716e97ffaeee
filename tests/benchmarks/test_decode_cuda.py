"""The GPU decode benchmark on a machine without one: its output and figures, and its arms over host memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from runtime.host_device import HostDevice
from tide_bench.arms.base import Timing
from tide_runtime.backends import BACKENDS
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.errors import TargetError
from typer.testing import CliRunner

from benchmarks.gpu import decode_cuda
from benchmarks.gpu.decode_arms import TorchArm, WaitClock
from benchmarks.gpu.decode_cases import ARMS, DecodeCase, decode_cases
from benchmarks.gpu.gpu_report import gpu_report
from benchmarks.gpu.model_shapes import SHAPES, ModelShape


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode_cuda.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(decode_cuda, "bundle", lambda *_: tmp_path)
    monkeypatch.setattr(decode_cuda.Bundle, "open", lambda path: SimpleNamespace(directory=path))


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(decode_cuda.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_nothing_looks_measured() -> None:
    """A table of figures that were not measured, or a green check."""
    done = run("--models", "demo,8b", "--batch", "1")
    assert done.exit_code == 2
    assert "NOT RUN: torch" in done.stderr and "no model was loaded on a GPU, run or timed" in done.stderr
    assert "16.1" in done.stdout or "15.0" in done.stdout  # GB that a step of the 8B shape reads in bf16
    assert "RESULT" not in done.stdout


@pytest.mark.usefixtures("no_gpu")
def test_an_unknown_model_is_named() -> None:
    """A typo would run the rest and leave a gap in the table."""
    assert "there is no model '7b'; choose from: demo" in run("--models", "7b").stderr.replace("\n", " ")


@pytest.mark.parametrize(("name", "least", "most"), [("1b", 1.1e9, 1.6e9), ("4b", 3.5e9, 4.6e9), ("8b", 7.4e9, 8.5e9)])
def test_shapes_are_of_the_size_they_are_called(name: str, least: float, most: float) -> None:
    """A ratio for a model of another size."""
    assert least < SHAPES[name].step_bytes("bf16", rows=1, length=1) / 2 < most


def arms_at(**ms: float) -> dict[str, dict[str, Any]]:
    """Figures of arms that take ``ms`` a token."""
    return {name: {"ms_per_token": value, "tokens_per_s": 1.0, "as_eager": 1.0} for name, value in ms.items()}


DEMO = next(case for case in decode_cases() if case.name == "demo_fp32_b1")


def test_ratios_are_the_others_time_over_ours() -> None:
    """Upside down they would show that cutting makes models faster."""
    report = gpu_report("decode_cuda", "H200")
    arms = arms_at(eager=6.0, compile=3.0, unsplit=1.9, tide=2.0)
    arms["tide"]["host_ms_per_token"] = 0.5
    decode_cuda.record(report, DEMO, arms)
    assert report.results["demo_fp32_b1_over_unsplit"] == pytest.approx(2.0 / 1.9)
    assert report.results["demo_fp32_b1_vs_eager"] == pytest.approx(3.0)
    assert report.results["demo_fp32_b1_tide_host_ms_per_token"] == 0.5
    assert decode_cuda.results_table(report).row_count == 1


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"unsplit": 1.9}, ["over_unsplit"]),
        ({"eager": 3.9}, ["vs_eager"]),
        ({"tide": 2.07, "eager": 4.0}, ["over_unsplit", "vs_eager"]),
    ],
)
def test_missed_promises_are_reported(changes: dict[str, float], missed: list[str]) -> None:
    """A slow release would print figures that are not compared with what was promised."""
    report = gpu_report("decode_cuda", "H200")
    decode_cuda.record(report, DEMO, arms_at(**{"eager": 6.0, "compile": 3.0, "unsplit": 2.0, "tide": 2.0} | changes))
    kept = {name: report.results[f"demo_fp32_b1_{name}_kept"] for name in ("over_unsplit", "vs_eager", "as_eager")}
    assert [name for name, value in kept.items() if not value] == missed
    assert len(decode_cuda.remarks(report)) == len(missed) and all("missed" in line for line in decode_cuda.remarks(report))


def test_one_other_token_is_not_identity() -> None:
    """99% of the demo model's tokens in fp32 is a bug, not rounding."""
    report = gpu_report("decode_cuda", "H200")
    arms = arms_at(eager=6.0, compile=3.0, unsplit=2.0, tide=2.0)
    arms["tide"]["as_eager"] = 63 / 64
    decode_cuda.record(report, DEMO, arms)
    assert report.results["demo_fp32_b1_as_eager_kept"] == 0


class FakeArm:
    """Says ``token`` again and again, a step taking ``ms``; ``host``: as `host_ms` answers."""

    def __init__(self, token: int, ms: float, host: float | None = None) -> None:
        self.token, self.ms, self.host, self.open = token, ms, host, True

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        assert self.open
        return Timing([[self.token] * new_tokens for _ in prompts], 1.0, 1e-3 * self.ms * (new_tokens - 1))

    def host_ms(self, prompts: list[list[int]], new_tokens: int) -> float | None:
        return self.host

    def close(self) -> None:
        self.open = False


class OutOfMemory(FakeArm):
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        raise RuntimeError("CUDA out of memory\nwith a long explanation")


def test_every_arm_is_measured_against_eager_and_closed() -> None:
    """A share of tokens that is compared with itself is always 100%; a model that stays leaves no room for the next."""
    made = {"eager": FakeArm(5, 6.0), "compile": FakeArm(5, 3.0), "unsplit": FakeArm(7, 2.0), "tide": FakeArm(5, 2.0, host=0.4)}
    found = decode_cuda.measure(made.__getitem__, list(made), [[1], [2]], new_tokens=4, repeats=3)
    assert {name: figures["as_eager"] for name, figures in found.items()} == {"eager": 1, "compile": 1, "unsplit": 0, "tide": 1}
    assert not any("tokens" in figures for figures in found.values())
    assert found["tide"]["host_ms_per_token"] == 0.4 and "host_ms_per_token" not in found["eager"]
    assert found["compile"]["ms_per_token"] == pytest.approx(3.0)
    assert found["compile"]["tokens_per_s"] == pytest.approx(2e3 / 3.0)
    assert not any(arm.open for arm in made.values())


@pytest.mark.parametrize("failing", list(ARMS))
def test_an_arm_that_fails_is_a_cell_with_the_reason(failing: str) -> None:
    """One model too large for the GPU would lose the figures of all others."""
    broken = OutOfMemory(5, 1.0)
    found = decode_cuda.measure(
        lambda name: broken if name == failing else FakeArm(5, 2.0), list(ARMS), [[1]], new_tokens=4, repeats=1
    )
    assert found[failing] == {"note": "RuntimeError: CUDA out of memory"} and not broken.open
    assert all("ms_per_token" in figures for name, figures in found.items() if name != failing)
    report = gpu_report("decode_cuda", "H200")
    decode_cuda.record(report, DEMO, found)
    assert decode_cuda.results_table(report).row_count == 1
    assert f"demo_fp32_b1: {failing} could not run: RuntimeError: CUDA out of memory" in decode_cuda.remarks(report)
    unchecked = [line for line in decode_cuda.remarks(report) if "not checked" in line]
    assert len(unchecked) == {"eager": 2, "compile": 0, "unsplit": 1, "tide": 3, "exact": 0}[failing]


def test_a_package_that_is_missing_is_a_reason(tmp_path: Path) -> None:
    """An arm that cannot even be loaded would end the benchmark."""

    def load(name: str) -> FakeArm:
        if name in ("unsplit", "tide", "exact"):
            raise TargetError("ONNX Runtime was installed without CUDAExecutionProvider")
        return FakeArm(5, 2.0)

    report = gpu_report("decode_cuda", "H200")
    decode_cuda.record(report, DEMO, decode_cuda.measure(load, list(ARMS), [[1]], new_tokens=4, repeats=1))
    assert "without CUDAExecutionProvider" in report.rows[0]["arms"]["tide"]["note"]
    assert report.settings["targets"] == []  # nothing of ours has run


def test_a_run_that_misses_a_promise_ends_well_and_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make gpu-check` would stop, or the run be published without its GPU, its target, or what it fell short of."""
    monkeypatch.setattr(decode_cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(decode_cuda.torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(decode_cuda, "release_memory", lambda: None)  # a second a call among the objects of other tests
    monkeypatch.setattr(decode_cuda, "load_arm", lambda case, cache, name: FakeArm(5, 4.0, host=0.5 if name == "tide" else None))
    done = run("--models", "demo", "--batch", "1,8", "--json", str(tmp_path / "run.json"))
    assert done.exit_code == 0, done.output
    assert "RESULT demo_fp32_b1_vs_eager_kept=0" in done.stdout and "RESULT demo_fp32_b1_over_unsplit_kept=1" in done.stdout
    assert "demo_int4_b1: missed: at batch 1 TIDE is at least twice as fast as HF eager; it is 1.000" in done.stdout
    assert (
        "RESULT demo_fp16_b8_tide_host_ms_per_token=0.5" in done.stdout and "vs_eager_kept" not in done.stdout.split("_b8_")[-1]
    )
    assert done.stdout.rstrip().endswith("RESULT promises_missed=3")
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["settings"]["targets"] == ["cuda"] and written["machine"]["gpu"] == "H200"


def test_bundles_are_deleted_once_their_model_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rented machine's disk would be full after some models: all default bundles of earlier releases together took 110 GB."""
    held: list[set[str]] = []

    def load(case: DecodeCase, cache: Path, name: str) -> FakeArm:
        decode_cuda.bundle_folder(case.shape, case.dtype, cache).mkdir(parents=True, exist_ok=True)
        held.append({folder.name for folder in cache.iterdir()})
        return FakeArm(5, 4.0)

    monkeypatch.setattr(decode_cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(decode_cuda.torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(decode_cuda, "release_memory", lambda: None)  # a second a call among the objects of other tests
    monkeypatch.setattr(decode_cuda, "load_arm", load)
    assert run("--cache", str(tmp_path)).exit_code == 0
    assert all(len(folders) == 1 for folders in held) and list(tmp_path.iterdir()) == []
    assert set.union(*held) == {"demo_fp32", "demo_fp16", "demo_int4", "1b_fp16", "1b_int4"}


# --- the arms, on this machine


TINY = ModelShape("tiny", ("fp32",), layers=4, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=120)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """Target `cuda` runs over host memory."""
    host, on_cpu = HostDevice(), ("CPUExecutionProvider", {})
    monkeypatch.setitem(
        BACKENDS, "onnxruntime-cuda", lambda b, target, threads, *_: OnnxRuntimeCudaBackend.load(b, target, threads, host, on_cpu)
    )
    return host


@pytest.mark.usefixtures("device")
def test_arms_generate_the_models_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of models with another text, in a second call too, where caches still hold the first."""
    monkeypatch.setattr(decode_cuda, "TorchArm", partial(TorchArm, device="cpu"))
    case = DecodeCase(TINY, "fp32", rows=3)
    given, reference = decode_cuda.prompts(case), TINY.load("fp32").model
    wanted = reference.generate(torch.tensor(given), max_new_tokens=12, do_sample=False, eos_token_id=None)[:, 64:].tolist()
    for name in ("eager", "unsplit", "tide", "exact"):
        arm = decode_cuda.load_arm(case, tmp_path, name)
        assert arm.generate(given, 5).tokens == [row[:5] for row in wanted], name
        timing = arm.generate(given, 12)
        assert timing.tokens == wanted and timing.decode_s > 0 and timing.first_token_s > 0, name
        host_ms = arm.host_ms(given, 12)
        assert (host_ms is None) == (name == "eager") and (host_ms or 1.0) > 0
        arm.close()


def test_waiting_is_not_the_hosts_time() -> None:
    """Host time per token is what the loop costs where the GPU is faster."""
    calls = []
    device = SimpleNamespace(synchronize=lambda: calls.append(1))
    clock = WaitClock(device)  # type: ignore[arg-type]
    device.synchronize()
    assert calls == [1] and clock.seconds > 0
