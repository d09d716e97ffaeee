"""Graphs of fp16 and int4 as target torch runs them on a GPU with Triton."""

from collections import Counter
from pathlib import Path

import pytest
from tide_runtime.backends.torch.fused_product import FUSED, with_fused_products
from tide_runtime.backends.torch.graph_file import read_graph
from tide_runtime.backends.torch.joined_nodes import GATE, with_gates, with_linear, with_tokens
from tide_runtime.backends.torch.torch_graph import ATTENTION, SKIP_NORM
from tide_runtime.bundle import Bundle

from tide_export.config import ExportConfig
from tide_export.export import export


@pytest.mark.parametrize("weights", ["source", "int4"])
def test_a_decoder_layer_is_four_products_and_attention(weights: str, hf_model_directory: Path, tmp_path: Path) -> None:
    """Breaks: a GPU runs norms, residuals or gates as kernels of their own, each of which takes as long as it takes to launch."""
    config = ExportConfig(max_seq_len=64, checkpoints="none", verify=False, targets=("torch",), dtype="fp16", weights=weights)
    export(str(hf_model_directory), tmp_path / "bundle", config)
    bundle = Bundle.open(tmp_path / "bundle")
    for segment in bundle.manifest.segments:
        graph = read_graph(bundle.path(bundle.manifest.targets["torch"].graphs[segment.name]))
        plain = with_tokens(with_gates(with_linear(graph), graph.outputs), graph.outputs)
        nodes = with_fused_products(plain, graph)
        counts, layers = Counter(node.op for node in nodes), sum(node.op == ATTENTION for node in plain)
        head = "logits" in graph.outputs
        assert counts[FUSED] == 4 * layers + head and not counts[GATE] and not counts[SKIP_NORM]
        known = {*graph.inputs, *graph.weights, *(name for node in nodes for name in node.outputs)}
        assert {name for node in nodes for name in node.inputs if name} | {*graph.outputs} <= known
