"""Every attribute, call and assignment that TIDE uses exists in TensorRT's real Python classes, of each supported release.

TensorRT itself cannot be had where CI runs; its bindings can, and they hold every class, method, argument and type. What our
files use is found by following their values (`inference`), so new code is checked without being listed anywhere.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from api import bindings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tide_export/targets", "runtime/tide_runtime", "plugins/tide_plugins/trt")
# Which of the two packages a file loads, by what it names; files that name neither serve both.
PACKAGE_NAMES = {"RTX": "tensorrt_rtx", "TENSORRT": "tensorrt", "TENSORRT_VOLTA": "tensorrt"}
# Graphs for TensorRT 10.4 hold no attention and no cache update (test_trt_sm_70), and its engines no plugins: building them never
# gets into these files.
NEWER_THAN_10_4 = {"attention_checks.py", "router_plugin.py", "aot.py"}


def uses_tensorrt(tree: ast.AST) -> bool:
    """Whether a file uses TensorRT's module, which is called ``trt`` by convention."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "trt")
        or (isinstance(node, ast.Attribute) and node.attr == "trt")
        or (isinstance(node, ast.Name) and node.id == "trt" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.ClassDef) and node.name == "TensorRTPackage")
        for node in ast.walk(tree)
    )


def packages_named(tree: ast.AST) -> set[str]:
    """The packages of the constants that a file uses, and those that it imports by their own names."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")]
    imported = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    return {PACKAGE_NAMES[name] for name in names & set(PACKAGE_NAMES)} | (imported & set(PACKAGE_NAMES.values()))


def files_for(package: str) -> list[Path]:
    found = []
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        packages = packages_named(tree)
        if uses_tensorrt(tree) and (not packages or package in packages):
            found.append(path)
    return found


def checked(module: str, folder: str, stubs: list[Path], files: list[Path]) -> dict:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    script = Path(__file__).with_name("in_bindings.py")
    command = [sys.executable, str(script), module, folder, ",".join(map(str, stubs)), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def enterprise(release: str, made_in: Path, files: list[Path]) -> dict:
    installed = bindings.folder(release)
    if installed is None:
        pytest.skip(f"TensorRT's bindings {release} are not in {bindings.FOLDER}: make bindings")
    return checked(bindings.MODULE, str(installed), bindings.empty_libraries(installed, made_in), files)


# Uses that the check has to find for each package, because a check without findings would pass.
USED = {
    "call of Builder.build_serialized_network",
    "call of OnnxParser.parse_from_file",
    "set_shape of IOptimizationProfile",
    "call of Runtime.deserialize_cuda_engine",
    "call of IExecutionContext.execute_async_v3",
    "call of IExecutionContext.set_tensor_address",
}
USED_FOR_PLUGINS = {"call of INetworkDefinition.add_constant", "call of INetworkDefinition.unmark_output"}
USED_FOR_ATTENTION = {"causal_kind of IAttention", "mask of IAttention", "NONE of CausalMaskKind"}


def test_tensorrt_11(tmp_path):
    """Guards against an AttributeError during export or load on a machine with TensorRT."""
    result = enterprise("11.4", tmp_path, files_for("tensorrt"))
    assert result["version"].startswith("11.4") and not result["problems"]
    assert set(result["checked"]) >= USED | USED_FOR_ATTENTION | USED_FOR_PLUGINS


def test_tensorrt_10_4(tmp_path):
    """Guards against uses of newer API on V100, which needs 10.4."""
    files = [path for path in files_for("tensorrt") if path.name not in NEWER_THAN_10_4]
    result = enterprise("10.4", tmp_path, files)
    assert result["version"].startswith("10.4") and not result["problems"]
    assert set(result["checked"]) >= USED


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_tensorrt_rtx():
    """Guards against uses of classes that only TensorRT has in the code for TensorRT-RTX."""
    result = checked("tensorrt_rtx", "", [], files_for("tensorrt_rtx"))
    assert result["version"].startswith("1.") and not result["problems"]
    assert set(result["checked"]) >= USED | USED_FOR_ATTENTION | {"call of IExecutionContext.is_stream_capturable"}


WRONG = """
class Log(trt.ILogger):
    def log(self, message): ...
    def flush(self): ...

def build(trt, network):
    config = trt.Builder(Log()).create_builder_config()
    config.max_auxiliary_streams = 0
    config.num_optimization_profiles = 2
    config.set_flag(trt.BuilderFlag.NO_SUCH)
    config.set_flag(trt.MemoryPoolType.WORKSPACE)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        layer.get_output(0).data_type
    return network.add_cast(layers[0], trt.float16)

def main(package):
    trt = importlib.import_module(package)
    build(trt, trt.Builder(None).create_network(flag=0))
    log = Log()
"""
FOUND_WRONG = [
    "wrong.py:3: ILogger.log is called with 2 arguments, takes 1",
    "wrong.py:4: ILogger.flush overrides nothing",
    "wrong.py:8: IBuilderConfig has no max_auxiliary_streams",
    "wrong.py:9: num_optimization_profiles of IBuilderConfig cannot be set",
    "wrong.py:10: BuilderFlag has no NO_SUCH",
    "wrong.py:11: IBuilderConfig.set_flag wants tensorrt_bindings.tensorrt.BuilderFlag as flag",
    "wrong.py:12: IBuilderConfig.set_memory_pool_limit lacks the argument pool_size",
    "wrong.py:15: ITensor has no data_type",
    "wrong.py:16: INetworkDefinition.add_cast wants tensorrt_bindings.tensorrt.ITensor as input",
    "wrong.py:20: Builder.create_network has no argument flag",
]


def test_mistakes_are_found(tmp_path):
    """Guards against a check that follows too few values to find mistakes."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("trt = importlib.import_module(name)\n" + WRONG.lstrip("\n"))
    result = enterprise("11.4", tmp_path, [wrong])
    assert sorted(result["problems"]) == sorted(FOUND_WRONG)
