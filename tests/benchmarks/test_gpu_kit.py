"""The GPU kit without a GPU: its processes, what it keeps when they die, what it imports and carries, what becomes of results."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.gpu.carried_bundle import WEIGHTS, pack, unpack
from benchmarks.gpu.kit import bare_image, child, command
from benchmarks.gpu.kit.case import KitCase, NotRun
from benchmarks.gpu.kit.child import FAILED, LOST, NOT_RUN, PASSED
from benchmarks.gpu.kit.plan import CALLS, SECONDS, Stage, chosen, expected_seconds
from benchmarks.gpu.kit.runner import Call, ResultFiles
from benchmarks.gpu.kit_report import gpu_kit_not_run, gpu_kit_table, kit_report, write_report

ROOT = Path(__file__).parents[2]
OWN = ("benchmarks", "tide_runtime", "tide_serve", "tide_calibrate", "tide_plugins", "tide_bench", "tide_export")

# A stage whose cases do what their names say.
SCRIPTED = """
import os, signal, time
from benchmarks.gpu.kit.case import KitCase, NotRun

def fails():
    raise ValueError("no\\nsecond line")

def cannot():
    raise NotRun("no compute-sanitizer")

def loses_context():
    import sys, types
    driver = types.ModuleType("driver")
    driver.cuCtxSynchronize = lambda: [types.SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")]
    sys.modules["cuda.bindings.driver"] = driver
    raise RuntimeError("an illegal memory access was encountered")

WORK = {
    "passes": lambda: {"figure": 1},
    "fails": fails,
    "cannot": cannot,
    "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(60),
    "loses": loses_context,
}

def kit_cases(bench, argument):
    for name in argument.split(","):
        yield KitCase(name, WORK[name.rstrip("0123456789")], dict)
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:

    (tmp_path / "scripted.py").write_text(SCRIPTED)
    places = [str(tmp_path), *(str(ROOT / folder) for folder in bare_image.FOLDERS)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setattr("benchmarks.gpu.kit.runner._POLL_S", 0.02)
    files = ResultFiles(tmp_path / "out", {"call": 1, "dry": False, "sources": "c0ffee", "date": "2026-12-01T10:00:00Z"})
    return Call(files, 30.0, {"arch": "sm_90", "work": str(tmp_path), "carried": str(tmp_path), "dry": False})


def stage(cases: str, limit: float = 30.0) -> Stage:
    return Stage("scripted", "scripted", cases, 1, limit, case_limit=0.6)


def lines(call: Call) -> list[dict[str, Any]]:
    """What came back."""
    return [json.loads(line) for line in (call.files.folder / "kit.jsonl").read_text().splitlines()]


def states(call: Call) -> dict[str, str]:
    return {line["case"]: line["state"] for line in lines(call) if line["case"] != "stage"}


def test_a_case_that_fails_dies_or_hangs_costs_only_itself(call: Call) -> None:
    """A kernel that faults, or a graph whose loop never ends, would cost the minutes that a GPU was lent for."""
    call.run([(stage("passes1,fails,dies,hangs,cannot,passes2"),)])
    assert states(call) == {
        **{"passes1": PASSED, "fails": FAILED, "dies": FAILED, "hangs": FAILED},
        **{"cannot": NOT_RUN, "passes2": PASSED},
    }
    found = {line["case"]: line for line in lines(call)}
    assert found["dies"]["reason"] == "the process died of SIGSEGV" and "stopped after" in found["hangs"]["reason"]
    assert found["fails"]["reason"].startswith("ValueError: no") and "in fails" in found["fails"]["traceback"]
    assert "Fatal Python error" in found["dies"]["traceback"]  # where it died
    assert "[scripted] ValueError: no" in (call.files.folder / "kit.log").read_text()


def test_after_a_fault_of_the_gpu_another_process_goes_on(call: Call) -> None:
    """After an illegal access every later case of the process fails with the same error, and says nothing of its own kernel."""
    call.run([(stage("loses,passes"),)])
    assert states(call) == {"loses": FAILED, "passes": PASSED} and LOST != 0


def test_a_stage_that_cannot_start_says_why_and_the_others_run(call: Call) -> None:
    """A package that is missing would look like a stage without cases, which passed."""
    call.run([(stage("unknown"), stage("passes"))])
    assert states(call) == {"start": FAILED, "passes": PASSED}
    assert "KeyError: 'unknown'" in next(line["traceback"] for line in lines(call) if line["case"] == "start")


def test_what_the_time_does_not_allow_is_left(call: Call) -> None:
    """A call that ends late is stopped from outside, and what it was about to write is lost."""
    call.seconds = 5.3
    call.run([(stage("passes,hangs,passes2", limit=0.5),), (stage("passes3"),)])
    found = states(call)
    assert found["start"] == "left" and "passes3" not in found and "passes2" not in found


def test_only_the_end_of_a_call_is_needed_to_read_it(call: Call) -> None:
    """A lent machine's reply holds the last lines: failures and the table of stages, after the figures."""
    call.run([(stage("passes,fails"),)])
    text = command.summary(call.files.results).splitlines()
    assert text[0] == "scripted, passes: figure 1" and text[1].startswith("FAILED scripted, fails: ValueError")
    assert text[-1].split()[:5] == ["scripted", "1", "passed,", "1", "failed"]


def test_the_calls_fit_into_the_time_that_a_gpu_is_lent_for() -> None:
    """15 minutes with the machine's start and thinking between: see SECONDS. All stages of a first call have names to repeat."""
    for number, rows in CALLS.items():
        assert expected_seconds(rows) <= SECONDS[number]
    assert [stage.name for row in chosen("torch,1b") for stage in row] == [
        "torch_kernels",
        "1b_int4_b1",
        "1b_fp16_b1",
        "1b_fp16_b8",
    ]
    with pytest.raises(ValueError, match="there is no stage '2b'"):
        chosen("1b,2b")


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "no_gpu", lambda: "there is no CUDA driver")
    monkeypatch.setattr(sys, "argv", ["kit"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "NOT RUN: there is no CUDA driver" in capsys.readouterr().out


# --- the bare image


def test_only_packages_of_the_image_are_imported() -> None:
    """The kit would end with ModuleNotFoundError on the lent machine, where nothing can be installed."""
    allowed = {*sys.stdlib_module_names, *OWN, *(name.replace("-", "_") for name in bare_image.PACKAGES)}
    allowed |= {"cuda", "runtime"}  # cuda-core's and cuda-bindings' package; the tests' simulated GPU
    found = {name for path in (ROOT / "benchmarks/gpu").rglob("*.py") for name in _imported(path)}
    assert found - allowed == set()


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_a_dry_run_hides_what_the_image_lacks(tmp_path: Path) -> None:
    """Guards against a dry run that passes because the developer's machine has more packages, or an installed tide-llm."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.gpu.kit import bare_image as image\n"
        "image.make_importable(Path(sys.argv[1])); image.hide_other_packages()\n"
        "import numpy, typer\n"
        "from importlib.metadata import distribution as dist; from importlib.util import find_spec\n"
        "from tide_runtime.plugins import plugin\n"
        "print(find_spec('openai'), find_spec('fastapi'), dist('tide-llm').locate_file('.'), plugin('loop_kernels').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "None", str(tmp_path / "metadata"), "tide_plugins.loop_kernels"], done.stderr


# --- what is carried


def bundle(folder: Path, arrays: dict[str, np.ndarray], scales: str = "") -> Path:
    """A bundle of one graph, whose weights lie one after the other."""
    (folder / "onnx").mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    tensors, offset, content = [], 0, b""
    for name, array in arrays.items():
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", WEIGHTS.name), ("offset", str(offset)), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        content += array.tobytes() + bytes(32)
        offset += array.nbytes + 32
    (folder / WEIGHTS).write_bytes(content)
    nodes = [helper.make_node("MatMulNBits", ["x", "packed", scales], ["y"], bits=4)] if scales else []
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], tensors)), folder / "onnx" / "g.onnx")
    return folder


def test_carried_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    """A demo model of other weights would not generate eager's tokens."""
    random = np.random.default_rng(0)
    wide = random.normal(size=(64, 48)).astype(np.float32)
    halves = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)
    base = bundle(tmp_path / "made" / "fp32", {"a": halves, "b": wide})
    narrow = bundle(tmp_path / "made" / "fp16", {"a": halves.astype(np.float16), "c": wide[:4].astype(np.float16)})
    for made, other in ((base, None), (narrow, base)):
        pack(made, tmp_path / "carried" / made.name, base=other)
    kinds = [
        b["kind"]
        for name in ("fp32", "fp16")
        for b in json.loads((tmp_path / "carried" / name / "weights.json").read_text())["blocks"]
    ]
    assert kinds == ["halves", "stored", "cast", "stored"]
    back = unpack(tmp_path / "carried" / "fp16", tmp_path / "back" / "fp16", "cpu")  # brings the other one along
    for made, unpacked in ((base, tmp_path / "back" / "fp32"), (narrow, back)):
        assert (unpacked / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes() and (unpacked / "manifest.json").exists()


def test_a_skeleton_has_no_weights_and_gets_sensible_ones(tmp_path: Path) -> None:
    """A 1B model would not travel; numbers of another size would overflow in fp16."""
    arrays = {
        "norm": np.full(1024, 3, np.float16),
        "packed": np.zeros((512, 512), np.uint8),
        "scales": np.full((512, 256), 7, np.float16),
        "dense": np.zeros((512, 256), np.float16),
    }
    made = bundle(tmp_path / "made", arrays, scales="scales")
    assert pack(made, tmp_path / "carried", is_random=True) < 8192 < sum(array.nbytes for array in arrays.values())
    back = unpack(tmp_path / "carried", tmp_path / "back", "cpu")
    content = (back / WEIGHTS).read_bytes()
    assert len(content) == (made / WEIGHTS).stat().st_size
    found, offset = {}, 0
    for name, array in arrays.items():
        found[name] = np.frombuffer(content, array.dtype, array.size, offset)
        offset += array.nbytes + 32
    assert (found["norm"] == 3).all() and found["packed"].std() > 60
    assert found["scales"].min() > 0 and found["scales"].max() < 0.02 and 0.018 < found["dense"].astype(np.float32).std() < 0.022


# --- the report


def line(stage: str, case: str, state: str = PASSED, **more: Any) -> dict[str, Any]:
    facts = {"call": 1, "dry": False, "sources": "c0ffee", "date": "2026-12-01T10:00:00Z", "seconds": 1.0}
    return facts | {"stage": stage, "case": case, "state": state} | more


def test_results_become_the_run_that_tables_are_drawn_from(tmp_path: Path) -> None:
    """Figures would be typed into the documentation, `torch` stay "not yet" after it has run, or a page show only what passed."""
    report = kit_report(
        [
            line("machine", "gpu", figures={"name": "H100", "driver": 13000}),
            line("machine", "packages", figures={"versions": {"torch": "2.11.0"}}),
            line("growing_memory", "count_down", FAILED, reason="AssertionError: 3\nmore"),
            line("1b_fp16_b1", "tide_full", figures={"ms": 2.5, "all_ms": [2.5, 2.5], "nodes": {"kernel": 3}}),
            line("growing_memory", "count_down", sources="beef", figures={"counts": [1]}),  # mended since: a later line counts
            line("growing_memory", "other", FAILED, reason="AssertionError: 4\nmore"),
        ]
    )
    assert report.settings["targets"] == ["torch"] and report.results["kit_growing_memory_failed"] == 1
    report.write(tmp_path / "2026-12-01-gpu_kit.json")
    table = gpu_kit_table(json.loads((tmp_path / "2026-12-01-gpu_kit.json").read_text()))
    assert "| growing_memory | 1 passed, 1 failed |" in table and "torch 2.11.0" in table
    assert "| 1b, fp16 | 1 |  |  |  | 2.50 |  |  |  |" in table
    assert "- growing_memory, other, failed: AssertionError: 4" in table and "more" not in table


def test_a_second_call_keeps_what_the_first_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fix between two calls would throw away the minutes of the first."""
    monkeypatch.setattr("benchmarks.gpu.kit_report.ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)  # the pages' tables
    for stage, figures in (("growing_memory", {"counts": [1]}), ("torch_kernels", {"gb_s": 3000.0})):
        (tmp_path / "kit.jsonl").write_text(json.dumps(line(stage, "c", figures=figures)) + "\n")
        write_report([tmp_path / "kit.jsonl"])
    [path] = (tmp_path / "docs" / "results").iterdir()
    assert [row["stage"] for row in json.loads(path.read_text())["rows"]] == ["torch_kernels", "growing_memory"]


def test_without_a_run_every_stage_is_not_run() -> None:
    """The page would claim what was never run."""
    rows = [row for row in gpu_kit_not_run().splitlines() if row.startswith("| ")][1:]
    assert len(rows) == sum(len(row) for row in CALLS[1]) and all("not run" in row for row in rows)


def test_a_reason_for_not_running_is_no_failure() -> None:
    """Without a tool the kit's exit code would be red for what the machine lacks."""

    def cannot() -> dict[str, Any]:
        raise NotRun("no compute-sanitizer")

    assert child.tried(KitCase("c", cannot, dict), dry=False) == {"state": NOT_RUN, "reason": "no compute-sanitizer"}
