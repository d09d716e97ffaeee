"""Types of the nodes in a captured CUDA graph, and which of them conditional bodies and repeated launches allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_PREFIX = "CU_GRAPH_NODE_TYPE_"
# CUDA_CONDITIONAL_NODE_PARAMS in the driver API: "Allowed node types are kernel nodes, empty nodes, child graphs, memsets,
# memcopies, and conditionals. This applies recursively to child graphs and conditional bodies."
_IN_BODIES = {"kernel", "empty", "graph", "memset", "memcpy", "conditional"}
_HOST, _HOST_COPY = "host", "memcpy of host memory"


def node_types(definition: Any, copies_host_memory: Callable[[Any], bool]) -> Counter[str]:
    """Nodes of ``definition``, a cuda.core GraphDefinition, and of its child graphs, counted by type such as ``kernel``.

    ``copies_host_memory``: `CapturingDevice.copies_host_memory`; those nodes count as ``memcpy of host memory``.
    """
    found: Counter[str] = Counter()
    for node in definition.nodes():
        kind = node.type.name.removeprefix(_PREFIX).lower()
        found[_HOST_COPY if kind == "memcpy" and copies_host_memory(node) else kind] += 1
        if kind == "graph":
            found += node_types(node.child_graph, copies_host_memory)
    return found


def why_not_in_a_body(types: Iterable[str]) -> str | None:
    """Reason why captured nodes of these types cannot run in a conditional body, or None.

    cuBLAS allocates workspaces in a capture with ``cudaMallocAsync`` unless its caller provides one (cuBLAS, section 2.1.12,
    CUDA Graphs Support), which ONNX Runtime does not: ``mem_alloc`` and ``mem_free``.
    """
    refused = sorted(set(types) - _IN_BODIES)
    return f"captured nodes of type {', '.join(refused)} are not allowed in conditional bodies" if refused else None


def why_not_repeatable(types: Mapping[str, int]) -> str | None:
    """Reason why a captured graph must not be launched at all, or None.

    A host function belongs to the run that queued it. ONNX Runtime releases a run's pinned buffers in one
    (``CudaStream::CleanUpOnRunEnd``), so a second launch would release them again (onnxruntime pull request 32081). A copy keeps
    its addresses: a library's buffer in host memory holds something else by the next launch.
    """
    if count := types.get(_HOST, 0):
        return f"it holds {count} host functions, which a library queued for one run only"
    if count := types.get(_HOST_COPY, 0):
        return f"it holds {count} copies of a library's host memory, which another run may have overwritten when it is launched"
    return None
