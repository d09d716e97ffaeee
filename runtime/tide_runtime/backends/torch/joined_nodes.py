"""Nodes of a graph that one torch call or kernel computes: products of the same input, and the gate of an MLP."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tide_runtime.backends.torch.graph_file import GraphFile, GraphNode

LINEAR = "linear"  # x and constant matrices → a product with each
GATE = "gate"  # silu(x) · y
TOKEN = "token"  # operator: index of the largest logit, -1 where that is not finite (`tide_export.passes.guard_token`)


def with_linear(graph: GraphFile) -> list[GraphNode]:
    """The nodes of ``graph`` with one `LINEAR` for all products of a value with constant matrices."""
    together: dict[str, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "MatMul" and len(graph.weights[node.inputs[1]].shape if node.inputs[1] in graph.weights else ()) == 2:
            together[node.inputs[0]].append(node)
    joined = list[GraphNode]()
    for node in graph.nodes:
        if node.op == "com.microsoft::FusedMatMul" and _reads_rows(node, graph):
            node = replace(node, op=LINEAR)
        products = together.get(node.inputs[0], []) if node.inputs else []
        if node not in products:
            joined.append(node)
        elif node is products[0]:
            names = (node.inputs[0], *(product.inputs[1] for product in products))
            joined.append(GraphNode(LINEAR, node.name, names, tuple(product.outputs[0] for product in products), {}))
    return joined


def _reads_rows(node: GraphNode, graph: GraphFile) -> bool:
    """Whether ``node`` is the product with a constant matrix [N, K] as it is stored: a head that shares the embedding."""
    others = {name: value for name, value in node.attributes.items() if (name, value) not in (("transB", 1), ("alpha", 1.0))}
    matrix = graph.weights.get(node.inputs[1])
    return node.attributes.get("transB") == 1 and not any(others.values()) and matrix is not None and len(matrix.shape) == 2


def with_gates(nodes: Sequence[GraphNode], outputs: Iterable[str]) -> list[GraphNode]:
    """The ``nodes`` with one `GATE` for x · sigmoid(x) · y, whose parts nothing else reads."""
    uses = Counter([*outputs, *(value for node in nodes for value in node.inputs)])
    makers = {name: node for node in nodes for name in node.outputs}
    joined = list[GraphNode]()
    gone = set[str]()
    for node in nodes:
        found = _gate(node, makers, uses) if node.op == "Mul" else None
        if found is not None:
            source, other, silu = found
            gone |= {silu.outputs[0], *silu.inputs} - {source}
            node = replace(node, op=GATE, inputs=(source, other))
        joined.append(node)
    return [node for node in joined if node.outputs[0] not in gone]


def _gate(node: GraphNode, makers: dict[str, GraphNode], uses: Counter[str]) -> tuple[str, str, GraphNode] | None:
    """x, y and the node of x · sigmoid(x), if ``node`` multiplies these."""
    for name, other in (node.inputs, node.inputs[::-1]):
        silu = makers.get(name)
        if silu is None or silu.op != "Mul" or uses[name] != 1:
            continue
        for source, opened in (silu.inputs, silu.inputs[::-1]):
            sigmoid = makers.get(opened)
            if sigmoid is not None and sigmoid.op == "Sigmoid" and sigmoid.inputs[0] == source and uses[opened] == 1:
                return source, other, silu
    return None


def with_tokens(nodes: Sequence[GraphNode], outputs: Iterable[str]) -> list[GraphNode]:
    """The ``nodes`` with one `TOKEN` for a guarded choice of the likeliest token."""
    uses = Counter([*outputs, *(value for node in nodes for value in node.inputs)])
    makers = {name: node for node in nodes for name in node.outputs}
    joined = list[GraphNode]()
    gone = set[str]()
    for node in nodes:
        chain = _choice(node, makers) if node.op == "Where" else []
        if chain and all(uses[part.outputs[0]] == 1 for part in chain):
            gone |= {part.outputs[0] for part in chain}
            source = chain[-1].inputs[0]
            cast = makers.get(source)
            if cast is not None and cast.op == "Cast" and uses[source] == 2:  # which the kernel does itself
                gone.add(source)
                source = cast.inputs[0]
            node = replace(node, op=TOKEN, inputs=(source,))
        joined.append(node)
    return [node for node in joined if node.outputs[0] not in gone]


def _choice(node: GraphNode, makers: dict[str, GraphNode]) -> list[GraphNode]:
    """The nodes before ``node`` of where(|max(x)| <= largest, argmax(x), -1) over the last axis; empty if it is not that."""
    compared, argmax = (makers.get(name) for name in node.inputs[:2])
    peak = makers.get(compared.inputs[0]) if compared is not None and compared.op == "LessOrEqual" else None
    largest = makers.get(peak.inputs[0]) if peak is not None and peak.op == "Abs" else None
    if compared is None or argmax is None or peak is None or largest is None:
        return []
    if (largest.op, argmax.op) != ("ReduceMax", "ArgMax") or largest.inputs[0] != argmax.inputs[0]:
        return []
    if argmax.attributes.get("axis", 0) != -1 or argmax.attributes.get("keepdims", 1):
        return []
    return [compared, peak, largest, argmax]
