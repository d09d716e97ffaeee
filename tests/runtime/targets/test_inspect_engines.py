"""``tide-inspect`` on engines: builder, architectures, and whether they run here, with a stand-in for TensorRT-RTX."""

import hashlib
import json
import sys
from dataclasses import replace
from enum import Enum, IntFlag
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.engine_info import EngineInfo, ProfileInfo, TensorInfo
from tide_runtime.bundle.manifest import MANIFEST_NAME, FileInfo, TargetInfo
from tide_runtime.cli.inspect import app
from tide_runtime.targets import target_choice
from tide_runtime.targets.gpu_probe import PresentGpu
from typer.testing import CliRunner

pytest.importorskip("cuda.core")

TOOL = "tensorrt-rtx 1.7.1.116"
LOGITS = TensorInfo("logits", "fp32", [1, "wanted", 5])
ENGINES = {
    "segment_0": EngineInfo(1.25, "fused", 1, [], []),
    "segment_1": EngineInfo(2.5, "decomposed", 2, [], [LOGITS]),
    "head": EngineInfo(0.05, "none", 0, [], []),
}
PROFILES = [ProfileInfo("decode", [1, 1, 4], [1, 1, 13]), ProfileInfo("prefill", [1, 1, 4], [1, 64, 64])]
HEADER_BYTES, PLAN_BYTES = 24, 1024


class Validity(Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class Diagnostics(IntFlag):
    VERSION_MISMATCH, UNSUPPORTED_CC, OLD_CUDA_DRIVER = 1, 2, 4


class PlayedRtx:
    """A stand-in for ``tensorrt_rtx`` whose engine files begin with their validity. ``read``: number of bytes it was given."""

    EngineValidity, EngineInvalidityDiagnostics = Validity, Diagnostics
    engine_header_size = HEADER_BYTES

    def __init__(self) -> None:
        self.read: list[int] = []
        self.__version__ = TOOL.split()[1]
        self.Logger = type("Logger", (), {"ERROR": 1, "WARNING": 2, "__init__": lambda self, severity: None})
        self.Runtime = lambda log: self

    def get_engine_validity(self, plan: bytes) -> tuple[Validity, int]:
        self.read.append(len(plan))
        validity, diagnostics = plan[:HEADER_BYTES].split()
        return Validity[validity.decode()], int(diagnostics)

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        return SimpleNamespace(device_memory_size_v2=256)


def plan(validity: Validity = Validity.VALID, diagnostics: int = 0) -> bytes:
    return f"{validity.name} {diagnostics}".encode().ljust(HEADER_BYTES).ljust(PLAN_BYTES, b"k")


def write_bundle(folder: Path, backend: str = "tensorrt-rtx", **plans: bytes) -> Bundle:
    """A bundle with the targets ``cpu`` and ``built``, whose engines are valid except for ``plans``."""
    manifest = tiny_manifest(TinyTransformer(0, (1.0, 1.0), 5, 8), [1])
    files = {f"onnx/cpu.{name}.onnx": b"graph" for name in ENGINES}
    files |= {f"engines/built/{name}.engine": plans.get(name, plan()) for name in ENGINES}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    processor = TargetInfo("onnxruntime-cpu", {name: f"onnx/cpu.{name}.onnx" for name in ENGINES}, None, {})
    built = TargetInfo(
        backend, {name: f"engines/built/{name}.engine" for name in ENGINES}, None, {}, [80, 89], TOOL, PROFILES, ENGINES
    )
    infos = {name: FileInfo(hashlib.sha256(content).hexdigest(), len(content)) for name, content in files.items()}
    manifest = replace(manifest, targets={"cpu": processor, "built": built}, files=infos)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle.open(folder)


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> PlayedRtx:
    """A machine with a GPU and TensorRT-RTX."""
    played = PlayedRtx()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", played)  # type: ignore[arg-type]
    monkeypatch.setattr(target_choice, "present_gpu", lambda: PresentGpu("L4", 89))
    return played


def inspect(bundle: Bundle, *options: str) -> str:
    done = CliRunner().invoke(app, [str(bundle.directory), *options], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    return done.stdout


def targets(bundle: Bundle) -> dict[str, Any]:
    return json.loads(inspect(bundle, "--json"))["targets"]


def row(printed: str, name: str, title: str = "Engines", column: int = 0) -> list[str]:
    """The cells of the row with ``name`` in ``column`` of the table ``title``."""
    lines = printed[printed.index(f"\n{title}") :].splitlines()
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    return next(cells for cells in rows if cells[column:][:1] == [name])


def test_facts(rtx: PlayedRtx, tmp_path: Path) -> None:
    """Guards against JSON facts of a single engine, or decomposed attention reported as fused."""
    facts = targets(write_bundle(tmp_path))
    built = facts["built"]
    assert (built["compute"], built["tool"], built["build_seconds"]) == ([80, 89], TOOL, 3.8)
    assert built["attention"] == {"fused": 1, "decomposed": 2}
    assert built["graph_bytes"] == len(ENGINES) * PLAN_BYTES and built["engines"]["head"]["bytes"] == PLAN_BYTES
    assert [(p["name"], p["rows"], p["tokens"]) for p in built["profiles"]] == [(p.name, p.rows, p.tokens) for p in PROFILES]
    assert set(built["engines"]) == set(ENGINES) and built["engines"]["segment_1"]["outputs"][0]["name"] == "logits"
    assert built["here"] == "valid" and facts["cpu"]["here"] == "yes"
    assert not {"tool", "engines"} & set(facts["cpu"])


def test_the_table_of_engines(rtx: PlayedRtx, tmp_path: Path) -> None:
    """Guards against facts in the wrong column, and engines listed as ONNX Runtime graphs."""
    printed = inspect(write_bundle(tmp_path))
    steps = "decode 1–4 × 1–13; prefill 1–4 × 1–64"
    assert row(printed, "built") == ["built", TOOL, "80, 89", "3", "3.0 KiB", "3.8", steps]
    engines = [row(printed, name, "Each engine", column=1)[2:5] for name in ENGINES]
    assert engines == [["1.0 KiB", "1.2", "1 fused"], ["1.0 KiB", "2.5", "2 decomposed"], ["1.0 KiB", "0.1", ""]]
    assert "cpu file" in printed and "built file" not in printed


def test_no_engines_no_table(tmp_path: Path) -> None:
    """Guards against an empty table for bundles without engines."""
    bundle = write_bundle(tmp_path)
    del bundle.manifest.targets["built"]
    (tmp_path / MANIFEST_NAME).write_text(bundle.manifest.to_json(), encoding="utf-8")
    assert "Engines" not in inspect(bundle)


SLOWER = plan(Validity.SUBOPTIMAL, Diagnostics.OLD_CUDA_DRIVER)
INVALID = plan(Validity.INVALID, Diagnostics.VERSION_MISMATCH | Diagnostics.UNSUPPORTED_CC)


@pytest.mark.parametrize(
    ("plans", "here"),
    [
        ({}, "valid"),
        ({"segment_1": SLOWER}, "valid, slower than one built here: segment_1.engine: old cuda driver"),
        ({"segment_1": INVALID}, "invalid: segment_1.engine: version mismatch, unsupported cc"),
        ({"segment_0": SLOWER, "head": INVALID}, "invalid: head.engine: version mismatch, unsupported cc"),
        ({"segment_0": SLOWER, "head": SLOWER}, "valid, slower than one built here: segment_0.engine: old cuda driver"),
        ({"head": plan(Validity.INVALID)}, "invalid: head.engine: no reason given"),
    ],
    ids=["valid", "slower", "invalid", "slower, then invalid", "slower twice", "no reason"],
)
def test_whether_engines_run_here(plans: dict[str, bytes], here: str, rtx: PlayedRtx, tmp_path: Path) -> None:
    """Guards against wrong verdicts, and against reading whole engine files to determine them."""
    bundle = write_bundle(tmp_path, **plans)
    assert targets(bundle)["built"]["here"] == here
    assert set(rtx.read) == {HEADER_BYTES}
    assert row(inspect(bundle), "built", "Runs here")[1] == here


def test_what_is_not_checked_says_why(rtx: PlayedRtx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a verdict or a traceback where validity cannot be determined."""
    bundle = write_bundle(tmp_path / "rtx")
    monkeypatch.setattr(target_choice, "present_gpu", lambda: None)
    assert targets(bundle)["built"]["here"] == "not checked: no GPU with a driver here"
    monkeypatch.setattr(target_choice, "present_gpu", lambda: PresentGpu("T4", 75))
    assert targets(bundle)["built"]["here"] == "no: was compiled for sm_80, sm_89"
    monkeypatch.setattr(target_choice, "present_gpu", lambda: PresentGpu("L4", 89))
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__=rtx.__version__))  # type: ignore[arg-type]
    other = write_bundle(tmp_path / "trt", backend="tensorrt")
    assert targets(other)["built"]["here"] == "not checked: TensorRT tells when it loads them"
    rtx.__version__ = "1.8.0"
    assert targets(bundle)["built"]["here"].startswith("no: the engines were built by tensorrt-rtx 1.7.1.116, here is 1.8.0")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # type: ignore[arg-type]
    assert "pip install 'tide-llm[rtx]'" in targets(bundle)["built"]["here"]
    assert not rtx.read
