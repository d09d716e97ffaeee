"""The attributes and parameters of cuda.core and cuda.bindings that the runtime uses exist in the real packages; no GPU needed.

The attributes are read from the source: those of every expression that is listed with its class in `HELD`.
"""

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tide_runtime
from runtime.simulated_gpu import (
    SimulatedBuilder,
    SimulatedCondition,
    SimulatedDefinition,
    SimulatedGraph,
    SimulatedNode,
    SimulatedStream,
)

RUNTIME = Path(tide_runtime.__file__).parent
core = pytest.importorskip("cuda.core", reason="the package cuda-core is not installed")
graph = pytest.importorskip("cuda.core.graph", reason="cuda-core has no graphs")
driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")

# file → expression in its source → class of its value
HELD = {
    "backends/device/cuda_device.py": {
        "self.gpu": core.Device,
        "self.core_stream": core.Stream,
        "self._pinned": core.LegacyPinnedMemoryResource,
        "buffer": core.Buffer,
        "self._event": core.Event,
        "self._api": driver,
        "api": driver,
        "api.CUdevice_attribute": driver.CUdevice_attribute,
        "self._api.CUresult": driver.CUresult,
        "self._api.CUmemorytype": driver.CUmemorytype,
        "self._api.CUstreamCaptureStatus": driver.CUstreamCaptureStatus,
        "self._api.CUpointer_attribute": driver.CUpointer_attribute,
        "parameters": driver.CUDA_MEMCPY2D,
        "copy": driver.CUDA_MEMCPY3D,
        "node": graph.MemcpyNode,
        "builder": graph.GraphBuilder,
        "builder.stream": core.Stream,
        "graph": graph.Graph,
    },
    "backends/device/mapped_memory.py": {
        "api": driver,
        "api.CUdevice_attribute": driver.CUdevice_attribute,
        "api.CUmemAllocationGranularity_flags": driver.CUmemAllocationGranularity_flags,
        "api.CUmemAllocationType": driver.CUmemAllocationType,
        "api.CUmemLocationType": driver.CUmemLocationType,
        "api.CUmemAccess_flags": driver.CUmemAccess_flags,
        "properties": driver.CUmemAllocationProp,
        "access": driver.CUmemAccessDesc,
        "location": driver.CUmemLocation,
    },
    "backends/device/deferred_frees.py": {"self._dropped.popleft()": core.Buffer},
    "device_loop/graph_driver.py": {
        "self._device.gpu": core.Device,
        "self._device.core_stream": core.Stream,
        "builder": graph.GraphBuilder,
        "builder.stream": core.Stream,
        "handles[index]": graph.GraphCondition,
        "graph": graph.Graph,
    },
    "device_loop/captured_nodes.py": {
        "definition": graph.GraphDefinition,
        "node": graph.ChildGraphNode,
        "node.type": driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
    },
}


def attributes(file: str) -> dict[str, set[str]]:
    """Expression → attributes used on it, for the expressions in `HELD`."""
    found: dict[str, set[str]] = {expression: set() for expression in HELD[file]}
    for node in ast.walk(ast.parse((RUNTIME / file).read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in found:
            found[ast.unparse(node.value)].add(node.attr)
    return found


@pytest.mark.parametrize("file", sorted(HELD))
def test_every_attribute_exists(file: str) -> None:
    """Guards against an AttributeError on the first real GPU."""
    for expression, names in attributes(file).items():
        assert names, f"{file} uses nothing of {expression}: the table is out of date"
        missing = {name for name in names if not hasattr(HELD[file][expression], name)}
        assert not missing, f"{expression} of {file}: {HELD[file][expression]} has no {sorted(missing)}"


def test_every_import_exists() -> None:
    """Guards against an ImportError on the first real GPU."""
    for path in RUNTIME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda."):
                module = __import__(node.module or "", fromlist=["*"])
                assert all(hasattr(module, alias.name) for alias in node.names), f"{path.name}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("simulated", "real"),
    [
        (SimulatedBuilder, graph.GraphBuilder),
        (SimulatedGraph, graph.Graph),
        (SimulatedStream, core.Stream),
        (SimulatedDefinition, graph.GraphDefinition),
        (SimulatedNode, graph.ChildGraphNode),
    ],
)
def test_the_simulated_gpu_has_only_what_is_real(simulated: Any, real: Any) -> None:
    """Guards against tests that pass only because the simulation offers more than cuda.core."""
    own = {"record", "invalidate", "execute", "kinds", "cloned", *(f.name for f in fields(simulated))} - {"stream", "child_graph"}
    names = {name for name in dir(simulated) if not name.startswith("_")} - own
    assert names and all(hasattr(real, name) for name in names), names
    for name in names:
        if isinstance(inspect.getattr_static(simulated, name), property) or not callable(getattr(simulated, name)):
            continue
        parameters = str(inspect.getdoc(getattr(real, name)))
        for parameter in list(inspect.signature(getattr(simulated, name)).parameters)[1:]:
            assert parameter in parameters, f"{name}({parameter})"
    assert hasattr(graph.GraphCondition, "handle") and SimulatedCondition is not None


def test_graphs_are_completed_with_options_that_exist() -> None:
    """Guards against a TypeError when the first graph is instantiated."""
    assert "auto_free_on_launch" in {f.name for f in fields(graph.GraphCompleteOptions)}


@pytest.mark.parametrize("file", ["cuda_device.py", "mapped_memory.py"])
def test_calls_take_what_they_are_given(file: str) -> None:
    """Guards against a wrong number of arguments to the driver's functions, which have no keyword names."""
    calls = 0
    for node in ast.walk(ast.parse((RUNTIME / "backends/device" / file).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[0] in ("self._api", "api"):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.startswith("cu") and not any(isinstance(argument, ast.Starred) for argument in node.args):
                assert len(node.args) == len(inspect.signature(getattr(driver, name)).parameters), name
                calls += 1
    assert calls > 5
