"""The GPU kit without a GPU: its processes, what it keeps when they die, what it imports, and what becomes of its results."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.gpu.kit import bare_image, child, command, pack, wheel_parts
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun
from benchmarks.gpu.kit.journal import FAILED, NOT_RUN, PASSED, Journal, read
from benchmarks.gpu.kit.plan import STAGES, Stage, chosen
from benchmarks.gpu.kit.report import decode_report, kit_report
from benchmarks.gpu.kit.run_stage import StageRun
from benchmarks.gpu.kit.stage_files import StageFiles
from benchmarks.gpu.kit.tables import gpu_kit_not_run, gpu_kit_table
from benchmarks.verified_table import verified_table

ROOT = Path(__file__).parents[2]
STAGE = Stage(9, "scripted", "a stage of these tests", 60)

# A stage whose cases do what their names say; the parent starts it as `python -m benchmarks.gpu.kit.child 9`.
SCRIPTED = """
import os, signal, sys, time
from benchmarks.gpu.kit import child, plan
from benchmarks.gpu.kit.case import KitCase, NotRun

def fails():
    raise ValueError("no\\nsecond line")

def cannot():
    raise NotRun("no onnxruntime-gpu")

WORK = {
    "passes": lambda: {"figure": 1},
    "fails": fails,
    "cannot": cannot,
    "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(60),
}

def cases(bench):
    for name in os.environ["KIT_CASES"].split(","):
        yield KitCase(name, 1.0, WORK[name.rstrip("0123456789")], dict, limit=0.6)

plan.STAGES = child.STAGES = {9: plan.Stage(9, "scripted", "", 60)}
sys.modules["benchmarks.gpu.kit.stages.scripted"] = sys.modules["__main__"]
if __name__ == "__main__":
    child.main()
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRun:
    """A run of the scripted stage, whose process is this file's script instead of the kit's."""
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED)
    places = [str(ROOT / folder) for folder in bare_image.FOLDERS]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    start = subprocess.Popen

    def popen(arguments: list[str], **more: Any) -> Any:
        assert arguments[:4] == [sys.executable, "-u", "-m", "benchmarks.gpu.kit.child"]
        return start([sys.executable, "-u", str(script), *arguments[4:]], **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    files = StageFiles(STAGE, tmp_path / "out", tmp_path / "work", (tmp_path / "mirror",))
    return StageRun(files, Bench("sm_90", tmp_path / "work", dry=False), 30.0, {"sources": "a", "commit": "b"}, lambda line: None)


def states(content: dict[str, Any]) -> dict[str, str]:
    return {case["case"]: case["state"] for case in content["cases"]}


def test_a_case_that_fails_dies_or_hangs_costs_only_itself(scripted: StageRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that faults, or a graph whose loop never ends, would cost the half hour that a GPU was rented for."""
    monkeypatch.setenv("KIT_CASES", "passes1,fails,dies,hangs,cannot,passes2")
    content = scripted.run(None)
    assert states(content) == {
        **{"passes1": PASSED, "fails": FAILED, "dies": FAILED, "hangs": FAILED},
        **{"cannot": NOT_RUN, "passes2": PASSED},
    }
    reasons = {case["case"]: case.get("reason") for case in content["cases"]}
    assert reasons["dies"] == "the process died of SIGSEGV" and "stopped after" in reasons["hangs"]
    assert reasons["fails"].startswith("ValueError: no") and reasons["cannot"] == "no onnxruntime-gpu"
    assert content["state"] == FAILED and content["complete"]
    for folder in (scripted.files.out, *scripted.files.mirrors):  # the mirror: $OUT, all that comes back from a lent machine
        assert json.loads((folder / STAGE.file_name).read_text()) == content


def test_a_stage_that_is_out_of_time_is_gone_on_with(scripted: StageRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that passed in an earlier call would run again, or those that were left would never run."""
    monkeypatch.setenv("KIT_CASES", "passes,hangs")
    monkeypatch.setattr("benchmarks.gpu.kit.run_stage._POLL_S", 0.02)
    scripted.limit = 0.0
    first = scripted.run(None)
    assert first["stopped"] == "stopped after the stage's 0 s" and not first["complete"] and FAILED not in states(first).values()
    scripted.files.write(first | {"cases": [{"case": "hangs", "state": PASSED, "figures": {"of": "the first call"}}]})
    scripted.limit, scripted.begun = 30.0, scripted.begun + 1
    content = scripted.run(scripted.files.read())
    assert states(content) == {"hangs": PASSED, "passes": PASSED} and content["complete"]
    assert content["cases"][0]["figures"] == {"of": "the first call"}


def test_a_stage_that_cannot_start_says_why(scripted: StageRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing would look like a stage without cases, which passed."""
    monkeypatch.setenv("KIT_CASES", "unknown")
    content = scripted.run(None)
    assert states(content) == {"start": FAILED} and content["state"] == FAILED and not content["complete"]
    assert "KeyError" in content["cases"][0]["log"]


def test_a_lost_context_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every later case of the process fails with the same error, and says nothing of its own kernel."""

    class Lost:
        name = "CUDA_ERROR_ILLEGAL_ADDRESS"

    def wrong() -> Figures:
        raise RuntimeError("an illegal memory access was encountered")

    stage, driver = ModuleType("stage"), ModuleType("driver")
    stage.cases = lambda bench: [KitCase("first", 1, wrong, dict), KitCase("second", 1, dict, dict)]  # type: ignore[attr-defined]
    driver.cuCtxSynchronize = lambda: [Lost]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.kit.stages.machine", stage)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    bench, path = Bench("sm_90", tmp_path, dry=False), tmp_path / "journal"
    assert child.run(0, bench, path) == child.LOST and list(read(path).results) == ["first"]
    assert child.run(0, bench, path) == 0 and [r["state"] for r in read(path).results.values()] == [FAILED, PASSED]


def test_a_line_that_was_cut_off_is_not_there(tmp_path: Path) -> None:
    """A call that is killed while it writes would leave results that the next one cannot read."""
    journal = Journal(tmp_path / "journal")
    journal.planned({"a": {"seconds": 1, "limit": 2}})
    journal.end({"case": "a", "state": PASSED})
    with (tmp_path / "journal").open("a") as file:
        file.write('{"end": {"case": "b", "sta')
    assert read(tmp_path / "journal").complete


# --- the calls


def stub_stage(files: StageFiles, complete: bool, sources: str, seconds: float = 5.0) -> dict[str, Any]:
    case = {"case": "c", "state": PASSED, "figures": {}}
    return {
        **{"stage": files.stage.number, "title": files.stage.title, "state": PASSED, "complete": complete, "dry": False},
        **{"sources": sources, "commit": "c0ffee", "date": "2026-12-01T10:00:00+00:00", "seconds": seconds},
        **{
            "expected_seconds": 9.0,
            "cases_planned": 1,
            "cases": [case],
            "machine": {"cpu": "c", "onnxruntime": "1", "torch": "2"},
        },
    }


def test_stages_with_results_of_the_same_sources_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call would spend its minutes on what the first has found; or keep results of kernels that were mended since."""
    monkeypatch.setattr(command, "sources_key", lambda: "now")
    ran: list[int] = []

    def run(self: StageRun, earlier: dict[str, Any] | None) -> dict[str, Any]:
        ran.append(self.files.stage.number)
        return stub_stage(self.files, True, "now")

    monkeypatch.setattr(StageRun, "run", run)
    for number, sources in ((0, "now"), (1, "before")):
        files = StageFiles(STAGES[number], tmp_path / "out", tmp_path)
        files.write(stub_stage(files, True, sources))
    mirror = tmp_path / "mirror"
    command.Call(tmp_path / "out", tmp_path, 100.0, (mirror,)).run(chosen("0,1,2"))
    assert ran == [1, 2] and (mirror / STAGES[0].file_name).exists()
    ran.clear()
    command.Call(tmp_path / "out", tmp_path, 10.0, again=True).run(chosen("0,1,2"))
    assert ran == []  # nothing is begun in the last seconds of a call


def test_what_could_not_run_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu comes in parts: a stage without it would count as done, and the parts have come in vain."""
    monkeypatch.setattr(command, "sources_key", lambda: "now")
    earlier: list[Any] = []
    monkeypatch.setattr(StageRun, "run", lambda self, content: earlier.append(content) or stub_stage(self.files, True, "now"))
    files = StageFiles(STAGES[6], tmp_path, tmp_path)
    passed, not_run = {"case": "a", "state": PASSED}, {"case": "b", "state": NOT_RUN, "reason": "onnxruntime-gpu missing"}
    files.write(stub_stage(files, True, "now") | {"cases": [passed, not_run]})
    command.Call(tmp_path, tmp_path, 100.0).run(chosen("6"))
    assert [content["cases"] for content in earlier] == [[passed]]


def test_the_exit_code_is_of_the_stages_that_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A red stage would pass for a green check, or a machine without onnxruntime-gpu for a red one."""
    import typer

    app = typer.Typer()
    app.command()(command.main)
    monkeypatch.setattr(command, "use_wheel", lambda parts, store: "")
    monkeypatch.setattr(command, "no_gpu", lambda: "there is no CUDA driver")
    without = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert without.exit_code == 2 and "NOT RUN: there is no CUDA driver" in without.output
    monkeypatch.setattr(command, "no_gpu", lambda: None)
    for state, code in ((PASSED, 0), (NOT_RUN, 0), (FAILED, 1), ("incomplete", 1)):
        monkeypatch.setattr(command.Call, "run", lambda *_, state=state: [{"state": PASSED}, {"state": state}])
        assert CliRunner().invoke(app, ["--out", str(tmp_path)]).exit_code == code
    assert "there is no stage 8" in CliRunner().invoke(app, ["--stages", "0,8"]).output


def test_the_stages_fit_into_three_calls_on_an_h100() -> None:
    """25 minutes are what a rented machine leaves beside its start and the transfers; a call ends before nine are over."""
    assert [stage.number for stage in STAGES] == list(range(8))
    assert all(stage.limit <= 9 * 60 for stage in STAGES)


# --- the bare image


def test_only_packages_of_the_image_are_imported() -> None:
    """The kit would end with ModuleNotFoundError on the rented machine, where nothing can be installed."""
    allowed = {*sys.stdlib_module_names, *bare_image.OWN, *(name.replace("-", "_") for name in bare_image.PACKAGES)}
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
        "print(find_spec('openai'), find_spec('mkdocs'), dist('tide-llm').locate_file('.'), plugin('loop_kernels').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "None", str(tmp_path / "metadata"), "tide_plugins.loop_kernels"], done.stderr


def test_what_travels_is_small_and_holds_what_the_kit_reads() -> None:
    """40 MiB of tree are what a lent machine takes beside a wheel."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: this is an unpacked source archive")
    content = pack.archive()
    assert len(content) < 40 * 2**20
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = archive.getnames()
    assert {"benchmarks/gpu/kit/__main__.py", "examples/demo_model/layerskip/model.safetensors", "pyproject.toml"} <= set(names)
    assert not [name for name in names if name.startswith(("examples/demo_model/stock/", "examples/demo_model/looped/"))]


# --- the wheel in parts


def fat_library(*architectures: int) -> bytes:
    """An ELF file with one section of GPU code: for each architecture 64 bytes that are its number."""
    entries = b""
    for architecture in architectures:
        header = wheel_parts._ENTRY.pack(2, 1, 64, 64) + bytes(28 - 16) + architecture.to_bytes(4, "little")
        entries += header.ljust(64, b"\x01") + bytes([architecture]) * 64
    container = bytes(8) + wheel_parts._CONTAINER.pack(wheel_parts._MAGIC, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(container) + len(names)
    sections = [(0, 0, 0), (1, 64, len(container)), (12, 64 + len(container), len(names))]
    elf = bytearray(64)
    elf[:4] = b"\x7fELF"
    elf[0x28:0x30], elf[0x3A:0x40] = table.to_bytes(8, "little"), b"\x40\x00\x03\x00\x02\x00"
    headers = b"".join(
        name.to_bytes(4, "little") + bytes(20) + offset.to_bytes(8, "little") + size.to_bytes(8, "little") + bytes(24)
        for name, offset, size in sections
    )
    return bytes(elf) + container + names + headers


def test_other_architectures_code_is_zeros_and_nothing_moves() -> None:
    """ONNX Runtime would find no kernels for the GPU, or the wheel be too large to travel."""
    before = fat_library(80, 90, 120)
    after = wheel_parts.pruned(before, 90)
    assert len(after) == len(before)
    assert bytes([90]) * 64 in after and bytes([80]) * 64 not in after and bytes([120]) * 64 not in after
    changed = {before[i] for i in range(len(before)) if before[i] != after[i]}
    assert changed == {80, 120}
    assert wheel_parts.pruned(b"no ELF file", 90) == b"no ELF file"


def test_a_wheel_comes_back_from_its_parts(tmp_path: Path) -> None:
    """Parts come in several calls, as one takes 64 MiB at most; half a wheel must not be imported."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as files:
        files.writestr("onnxruntime/__init__.py", "there = True")
        files.writestr("onnxruntime/capi/lib.so", fat_library(80, 90))
        files.writestr("onnxruntime/tools/convert.py", "x" * 1000)
    parts = wheel_parts.split(wheel_parts.packed(tmp_path / "a.whl", 90), tmp_path / "parts", 100)
    store, call = tmp_path / "store", tmp_path / "call"
    assert len(parts) > 2 and wheel_parts.collect(call, store) == "no parts of onnxruntime-gpu"
    call.mkdir()
    last = parts[-1].rename(call / parts[-1].name)
    assert "bring the others: [0, 1" in wheel_parts.collect(call, store) and not (store / "site").exists()
    last.unlink()
    assert wheel_parts.collect(tmp_path / "parts", store) == "onnxruntime-gpu is unpacked"
    assert (store / "site/onnxruntime/__init__.py").read_text() == "there = True"
    assert not (store / "site/onnxruntime/tools").exists()


# --- the report


def decode_stage(**arms: dict[str, Any]) -> dict[str, Any]:
    """Stage 6 with arms of one case."""
    content = stub_stage(StageFiles(STAGES[6], Path(), Path()), True, "now")
    cases = [{"case": f"1b_fp16_b1_{arm}", "state": PASSED, "figures": figures} for arm, figures in arms.items()]
    return content | {"cases": cases}


def figures_of(ms: float, tokens: list[list[int]]) -> dict[str, Any]:
    return {"ms_per_token": ms, "tokens_per_s": 1e3 / ms, "tokens": tokens, "host_ms_per_token": 0.1}


def test_results_become_the_runs_that_tables_are_drawn_from(tmp_path: Path) -> None:
    """Figures would be typed into the documentation, or `cuda` stay "not yet" after it has run."""
    stage = decode_stage(eager=figures_of(4.0, [[1, 2]]), unsplit=figures_of(1.0, [[1, 2]]), tide=figures_of(1.02, [[1, 3]]))
    kit, decode = kit_report([stage]), decode_report(stage, {"gpu": "H100"})
    assert decode.results["1b_fp16_b1_vs_eager"] == pytest.approx(4 / 1.02)
    assert decode.results["1b_fp16_b1_as_eager"] == 0.5 and decode.results["1b_fp16_b1_over_unsplit_kept"] == 1
    assert kit.settings["targets"] == ["cuda"] == decode.settings["targets"] and kit.date.startswith("2026-12-01")
    kit.write(tmp_path / "2026-12-01-gpu_kit.json")
    assert "yes: unknown GPU, 2026-12-01" in verified_table(tmp_path)
    table = gpu_kit_table(json.loads((tmp_path / "2026-12-01-gpu_kit.json").read_text()))
    assert "| 6 |" in table and "3 passed" in table and table.count("not run") == 7 and "[1, 2]" not in table


def test_failures_are_in_the_table_with_their_reasons() -> None:
    """A page that shows what passed only would hide what is wrong on a GPU."""
    content = stub_stage(StageFiles(STAGES[2], Path(), Path()), True, "now")
    content |= {"state": FAILED, "cases": [{"case": "exit_gate b1", "state": FAILED, "reason": "AssertionError: is 3\nmore"}]}
    report = kit_report([content])
    assert report.settings["targets"] == [] and report.results["kit_stage2_failed"] == 1
    table = gpu_kit_table({"date": report.date, "machine": report.machine, "rows": report.rows})
    assert "- Stage 2, exit_gate b1, failed: AssertionError: is 3" in table and "more" not in table


def test_what_cublas_leaves_in_a_graph_is_shown() -> None:
    """Whether loops over ONNX Runtime can be conditional hangs on it."""
    content = stub_stage(StageFiles(STAGES[1], Path(), Path()), True, "now")
    found = {"nodes": {"KERNEL": 1, "MEM_ALLOC": 1}, "in_while_body": "cuGraphAddChildGraphNode: CUDA_ERROR_NOT_SUPPORTED"}
    content |= {"cases": [{"case": "cublas_default", "state": PASSED, "figures": {"2048x1x8192": found}}]}
    report = kit_report([content])
    table = gpu_kit_table({"date": report.date, "machine": report.machine, "rows": report.rows})
    assert "- cublasGemmEx 2048x1x8192, workspace default: 1 KERNEL, 1 MEM_ALLOC; in a WHILE body: cuGraphAddChild" in table


def test_without_a_run_every_stage_is_not_run() -> None:
    """The page would claim what was never run."""
    lines = [line for line in gpu_kit_not_run().splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(STAGES) and all("not run" in line for line in lines)


def test_a_reason_for_not_running_is_no_failure(tmp_path: Path) -> None:
    """Without onnxruntime-gpu the kit's exit code would be red for what the machine lacks."""

    def cannot() -> Figures:
        raise NotRun("onnxruntime-gpu missing")

    result = child._tried(KitCase("c", 1, cannot, dict), dry=False)
    assert result == {"case": "c", "state": NOT_RUN, "reason": "onnxruntime-gpu missing"}
