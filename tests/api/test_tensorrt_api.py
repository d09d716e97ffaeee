"""Every attribute, call and assignment that TIDE uses exists in TensorRT's real Python classes, of each supported release.

TensorRT itself cannot be had where CI runs; its bindings can, and they hold every class, method, argument and type.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api import bindings

ROOT = Path(__file__).resolve().parents[2]
MODULE = ("trt", "self._trt", "engine.trt")  # what our files call it
OUTPUT = {"layer.get_output(0)": "ITensor", "layer.get_input(0)": "ITensor"}
TENSORS = {"network.get_input(i)": "ITensor", "network.get_output(i)": "ITensor"}
# File → function ('' anywhere in it) → expression in its source → class of its value.
HELD: dict[str, dict[str, dict[str, str]]] = {
    "tide_export/targets/attention_checks.py": {
        "": {"trt": "module", "network": "INetworkDefinition", "attention": "IAttention", "layer": "ILayer", **TENSORS},
        "attentions": {"layer": "IAttentionInputLayer"},
        "cache_updates": {"layer": "IKVCacheUpdateLayer", **OUTPUT},
    },
    "tide_export/targets/engine_build.py": {
        "": {"trt": "module", "engine.trt": "module", "engine.builder": "Builder", "config": "IBuilderConfig"},
        "build_engine": {"attention": "IAttention"},
    },
    "tide_export/targets/engine_network.py": {
        "": {"trt": "module", "builder": "Builder", "network": "INetworkDefinition", "self.network": "INetworkDefinition"},
        "read_network": {"parser": "OnnxParser", "parser.get_error(i)": "ParserError"},
        "_tensor": {"tensor": "ITensor", "tensor.dtype": "DataType"},
        "add_profiles": {"engine.builder": "Builder", "profile": "IOptimizationProfile", "config": "IBuilderConfig"},
    },
    "tide_export/targets/router_plugin.py": {
        "": {"trt": "module", "network": "INetworkDefinition", "operators": "ITensor", "score": "ITensor"},
        "put_router": {"network.add_constant(array.shape, trt.Weights(array))": "IConstantLayer"},
        "_named": {"tensor": "ITensor"},
    },
    "tide_export/targets/rtx.py": {"configure": {"trt": "module", "config": "IBuilderConfig"}},
    "tide_export/targets/trt.py": {
        "attach": {"config": "IBuilderConfig"},
        "save": {"self._timings": "ITimingCache"},
        "": {"trt": "module"},
    },
    "runtime/tide_runtime/backends/tensorrt/backend.py": {
        "": {"trt": "module", "self._trt": "module", "self._runtime": "Runtime", "self.native": "IExecutionContext"},
        "__init__": {"engine": "ICudaEngine"},
        "enqueue": {"context.native": "IExecutionContext"},
        "_bound_context": {"context": "IExecutionContext"},
        "_new_context": {"engine": "ICudaEngine", "options": "IRuntimeConfig"},
    },
    "runtime/tide_runtime/backends/tensorrt/package.py": {"": {"trt": "module"}},
    "runtime/tide_runtime/backends/tensorrt/refit.py": {
        "": {"trt": "module", "refitter": "Refitter", "parser": "OnnxParserRefitter", "parser.get_error(i)": "ParserError"}
    },
    "runtime/tide_runtime/backends/tensorrt/validity.py": {"": {"trt": "module", "runtime": "Runtime"}},
    "plugins/tide_plugins/trt/aot.py": {"_suffix": {"trt": "module"}},
}
FILES = {path.rpartition("/")[2]: path for path in HELD}
RTX_ONLY, TENSORRT_ONLY = {"rtx.py", "validity.py"}, {"trt.py", "aot.py"}
# Graphs for TensorRT 10.4 hold no attention and no cache update (test_trt_sm_70), and its engines no plugins: building them never
# gets into these files.
NEWER_THAN_10_4 = {"attention_checks.py", "router_plugin.py", "aot.py"}


def checked(module: str, folder: str, stubs: list[Path], held: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(Path(__file__).with_name("held_expressions.py")), module, folder, ",".join(map(str, stubs))]
    done = subprocess.run(command, input=json.dumps(held), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def enterprise(release: str, made_in: Path, held: dict[str, Any]) -> dict[str, Any]:
    installed = bindings.folder(release)
    if installed is None:
        pytest.skip(f"TensorRT's bindings {release} are not in {bindings.FOLDER}: make bindings")
    return checked(bindings.MODULE, str(installed), bindings.empty_libraries(installed, made_in), held)


def all_but(files: set[str]) -> dict[str, Any]:
    return {str(ROOT / path): HELD[path] for name, path in FILES.items() if name not in files}


def without(classes: set[str], table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """``table`` without the values of these ``classes``, which a release does not have."""
    return {function: {e: kind for e, kind in held.items() if kind not in classes} for function, held in table.items()}


def test_every_file_is_listed() -> None:
    """Guards against new code that is checked nowhere."""
    using = set()
    for folder in ("tide_export/targets", "runtime/tide_runtime", "plugins/tide_plugins/trt"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if any(isinstance(node, ast.Attribute) and ast.unparse(node.value) in MODULE for node in nodes):
                using.add(path.relative_to(ROOT).as_posix())
    assert using == set(HELD)


@pytest.mark.parametrize(
    ("release", "newer", "lacks"),
    [("11.4", set(), {"IRuntimeConfig"}), ("10.4", NEWER_THAN_10_4, {"IRuntimeConfig", "IAttention"})],
    ids=["11.4", "10.4"],
)
def test_tensorrt(release: str, newer: set[str], lacks: set[str], tmp_path: Path) -> None:
    """Guards against an AttributeError during export or load on a machine with TensorRT; V100 needs 10.4."""
    held = {path: without(lacks, table) for path, table in all_but(RTX_ONLY | newer).items()}
    result = enterprise(release, tmp_path, held)
    assert result["version"].startswith(release) and not result["problems"]


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed")
def test_tensorrt_rtx() -> None:
    """Guards against uses of classes that only TensorRT has in the code for TensorRT-RTX."""
    result = checked("tensorrt_rtx", "", [], all_but(TENSORRT_ONLY))
    assert result["version"].startswith("1.") and not result["problems"]


WRONG = """
class Log(trt.ILogger):
    def log(self, message): ...
    def flush(self): ...

config.max_auxiliary_streams = 0
config.num_optimization_profiles = 2
config.set_flag(trt.BuilderFlag.NO_SUCH)
config.set_flag(trt.MemoryPoolType.WORKSPACE)
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
layer.get_output(0).data_type
network.add_cast(layer, trt.float16)
trt.Builder(None).create_network(flag=0)
builder.create_network(flag=0)
"""
OF_WRONG = {"trt": "module", "config": "IBuilderConfig", "layer": "ILayer", "network": "INetworkDefinition", "builder": "Builder"}
FOUND_WRONG = [
    "wrong.py:3: ILogger.log is called with 2 arguments, takes 1",
    "wrong.py:4: ILogger.flush overrides nothing",
    "wrong.py:6: IBuilderConfig has no max_auxiliary_streams",
    "wrong.py:7: num_optimization_profiles of IBuilderConfig cannot be set",
    "wrong.py:8: BuilderFlag has no NO_SUCH",
    "wrong.py:9: IBuilderConfig.set_flag wants BuilderFlag as flag",
    "wrong.py:10: IBuilderConfig.set_memory_pool_limit lacks the argument pool_size",
    "wrong.py:11: ITensor has no data_type",
    "wrong.py:12: INetworkDefinition.add_cast wants ITensor as input",
    "wrong.py:14: Builder.create_network has no argument flag",
    "wrong.py: nothing is used of unused",
]


def test_mistakes_are_found(tmp_path: Path) -> None:
    """Guards against a check that finds nothing."""
    (tmp_path / "wrong.py").write_text(WRONG)
    held = OF_WRONG | {"layer.get_output(0)": "ITensor", "unused": "ITensor"}
    result = enterprise("11.4", tmp_path, {str(tmp_path / "wrong.py"): {"": held}})
    assert result["problems"] == sorted(FOUND_WRONG)
