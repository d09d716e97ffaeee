"""The graphs for V100: the model's numbers, in operators that TensorRT 10.4's parser has. Nothing here runs TensorRT."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from export.architectures import MAX_POSITIONS, VOCAB, WINDOW

from tide_export.graphs.cut import CutGraph
from tide_export.passes.base import LoweringContext
from tide_export.passes.tensorrt_10_4 import ELEMENT_TYPES
from tide_export.targets import TARGETS
from tide_export.targets.lower import lower, prepare
from tide_export.trace.trace_model import TracedModel

# Grouped heads, sliding window, window and soft-cap, learned positions, sinks.
NAMES = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss")
SLOTS = MAX_POSITIONS // 2
# Tokens of each sequence per step: a ragged prompt longer than the window, decode, drafts of several lengths.
STEPS = ([21, 3, 9], [1, 1, 1], [1, 1, 1], [4, 2, 1], [1, 5, 1])
TOLERANCE = 1e-4  # fp32
CONTEXT = LoweringContext(SLOTS)


@pytest.fixture(scope="module")
def lowered(exported):
    """``lowered(architecture)``: its graphs for V100: two segments, the head, and what fills the cache behind the first layer."""
    made: dict[str, list[CutGraph]] = {}

    def make(name: str) -> list[CutGraph]:
        if name not in made:
            made[name] = lowered_after(exported(name).traced, 1)
        return made[name]

    return make


def lowered_after(traced: TracedModel, layer: int) -> list[CutGraph]:
    """The graphs with a cut and an exit after ``layer``. ``traced`` is modified."""
    prepare(traced, TARGETS["trt-sm_70"], CONTEXT)
    return lower(traced, TARGETS["trt-sm_70"], [layer], CONTEXT).graphs


class Steps:
    """Two segments with their caches; each step reads the caches that the last one wrote."""

    def __init__(self, graphs: list[CutGraph]) -> None:
        self.sessions = [session(graph.model) for graph in graphs if graph.layers is not None]
        self.caches: dict[str, np.ndarray] = {}

    def run(self, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
        """Logits [B, S, V] of ``ids`` [B, S] behind ``lengths`` filled slots of each sequence."""
        write_index = np.array(lengths, np.int64)
        positions = write_index[:, None] + np.arange(ids.shape[1])
        given = {"input_ids": ids, "position_ids": positions, "write_index": write_index, "logits_index": np.arange(ids.size)}
        for segment in self.sessions:
            for value in segment.get_inputs():
                if "_cache_" in value.name:
                    given[value.name] = self.caches.get(value.name, np.zeros([len(ids), *value.shape[1:]], np.float32))
            feeds = {value.name: given[value.name] for value in segment.get_inputs()}
            outputs = dict(zip([v.name for v in segment.get_outputs()], segment.run(None, feeds), strict=True))
            given["hidden"] = outputs.get("hidden_out")
            self.caches |= {name.replace("_out", ""): array for name, array in outputs.items() if "_cache_out_" in name}
        return outputs["logits"].reshape(*ids.shape, -1)


def session(model: ir.Model) -> ort.InferenceSession:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_models(exported, lowered, name):
    """A V100 would compute another model than was exported: in prefill, decode, ragged batches or past a window."""
    model, steps, random = exported(name).model, Steps(lowered(name)), np.random.default_rng(0)
    texts: list[list[int]] = [[], [], []]
    assert max(STEPS[0]) > 2 * WINDOW
    for counts in STEPS:
        ids = random.integers(3, VOCAB, (len(texts), max(counts)))
        logits = steps.run(ids, [len(text) for text in texts])
        for sequence, count in enumerate(counts):
            texts[sequence] += ids[sequence, :count].tolist()
            with torch.no_grad():
                expected = model(torch.tensor([texts[sequence]])).logits[0, -count:].numpy()
            np.testing.assert_allclose(logits[sequence, :count], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_is_in_the_table(lowered, name):
    """TensorRT 10.4 would refuse the file, on the machine that the export was meant for."""
    layers = {"segment_0": 1, "segment_1": 1, "head": 0}
    assert [graph.name for graph in lowered(name)] == list(layers)
    for graph in lowered(name):
        proto = ir.to_proto(graph.model)
        onnx.checker.check_model(proto, full_check=True)
        assert {node.op_type for node in proto.graph.node} <= set(ELEMENT_TYPES)
        assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 20)] and not proto.functions
        caches = [v for v in (*proto.graph.input, *proto.graph.output) if "_cache_" in v.name]
        assert all(value.type.tensor_type.shape.dim[2].dim_value == SLOTS for value in caches)
        assert len(caches) == 4 * layers[graph.name]
