"""Segments compiled by TensorRT-RTX without the GPU: the parsed network and the built engine."""

import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from rich.console import Console
from slow_cases import slow_but
from targets.lowered_graphs import host_copies
from targets.tiny_graphs import DTYPES, LAYERS, SLOTS, copy_of, retyped, segment, traced
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu

from tide_export.graphs.cut import CutGraph
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS
from tide_export.targets.attention_checks import attentions
from tide_export.targets.engine_build import BuildSettings, BuiltEngine, build_engine
from tide_export.targets.engine_network import EngineNetwork, read_network, require_no_errors
from tide_export.targets.engines import step_profiles
from tide_export.targets.graph_files import GraphFile, write_graph_file
from tide_export.targets.lower import lower, prepare
from tide_export.weights.quantized_weight import QuantizedWeight, pack_nibbles

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'tide-llm[rtx]'")

FUSED = ("llama", "qwen3", "gpt2", "mistral")  # Mistral has a window of 8 tokens
ALL = [*FUSED, "gemma2"]  # Gemma-2's attentions have a soft-cap, which the fused ones refuse
# Every GPU that has a target of its own is compiled for once or twice; Turing has no bf16.
GPUS = {"fp16": (75, 80, 86, 89, 120), "bf16": (121, 89, 120, 80, 86)}
PROFILES = step_profiles(max_batch=4, draft_limit=4, max_seq_len=SLOTS)
FUSED_INT4 = b"runtime_fusion={ name=__myl_ReplCastMulCastFc"  # a product that dequantises its weight on the way
# In the source of a fused attention: its struct, and its parameter for cache tiles that no token sees.
FUSED_ATTENTION = b"struct _gemm_mha_v2_callback {"
SKIPS_TILES = re.compile(rb"int32_t\* _tile_skip_map,\s*__myln_")


def network(name: str, dtype: str, folder: Path) -> EngineNetwork:
    return read_network(trt, write_graph_file(segment(name, dtype), folder))


def settings_for(*gpus: int) -> BuildSettings:
    def configure(module, config) -> None:
        config.num_compute_capabilities = len(gpus)
        for place, compute in enumerate(gpus):
            config.set_compute_capability(getattr(module.ComputeCapability, f"SM{compute}"), place)

    return BuildSettings(PROFILES, configure)


def build(
    name: str, dtype: str, folder: Path, compute: int = 89, progress: ExportProgress | None = None
) -> tuple[EngineNetwork, BuiltEngine]:
    made, reparse = network(name, dtype, folder), partial(network, name, dtype, folder)
    return made, build_engine(made, reparse, settings_for(compute), progress or ExportProgress(quiet=True), name)


@pytest.mark.parametrize(
    ("name", "dtype", "compute"),
    slow_but(
        ((name, dtype, compute) for dtype, gpus in GPUS.items() for name, compute in zip(ALL, gpus, strict=True)),
        (ALL[0], "fp16", GPUS["fp16"][0]),
    ),
)
def test_segment_compiles(name, dtype, compute, tmp_path):
    """An engine would attend to the wrong slots, copy its caches, lack a kind of step, or hide an error in the log."""
    made, engine = build(name, dtype, tmp_path, compute)
    found = attentions(trt, made.network)
    assert len(found) == made.attentions == (LAYERS[name] if name in FUSED else 0)
    for attention in found:
        assert attention.mask is not None and attention.causal_kind == trt.CausalMaskKind.NONE
        assert not attention.decomposable
    caches = {f"{kind}_cache_out_{i}": f"{kind}_cache_{i}" for kind in ("key", "value") for i in range(LAYERS[name])}
    assert made.aliases == caches
    inputs = {tensor.name: tensor for tensor in made.inputs}
    assert set(inputs) == {"input_ids", "position_ids", "write_index", "logits_index", *caches.values()}
    assert {tensor.dtype for tensor in made.inputs if "cache" in tensor.name} == {dtype}
    assert inputs["key_cache_0"].shape[2] == SLOTS and inputs["write_index"].dtype == "int64"
    require_no_errors(made.log, name)
    assert engine.attention == ("fused" if name in FUSED else "none")
    assert b"[profile 1]" in engine.plan and b"[profile 2]" not in engine.plan
    assert engine.plan.count(FUSED_ATTENTION) == len(SKIPS_TILES.findall(engine.plan)) == len(found) * len(PROFILES)
    assert host_copies(engine.plan) == 0


def causal_file(name: str, folder: Path) -> GraphFile:
    """The graph with ONNX's own causality in place of masks."""
    graph = segment(name, "fp16")
    for node in [node for node in graph.model.graph if node.op_type == "Attention"]:
        node.replace_input_with(3, None)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    return write_graph_file(graph, folder)


def test_causal_attention_is_not_built(tmp_path):
    """The parser reads ``is_causal`` as a mask from the upper left: a decode step would attend to slot 0 alone."""
    with pytest.raises(TargetError, match="an attention has no mask and causality UPPER_LEFT"):
        read_network(trt, causal_file("llama", tmp_path))


def test_a_missing_attention_is_noticed(tmp_path):
    """A parser that leaves an attention out, or folds two into one, would go unnoticed."""
    file = write_graph_file(segment("llama", "fp16"), tmp_path)
    file.operators["Attention"] += 1
    with pytest.raises(TargetError, match="made 2 attentions of 3"):
        read_network(trt, file)


def test_fp32_attention_is_decomposed_and_announced(tmp_path):
    """fp32, which has no fused kernel, would fail to build, or be slow without a note."""
    printed = io.StringIO()
    _, engine = build("llama", "fp32", tmp_path, progress=ExportProgress(Console(file=printed, width=200)))
    assert engine.attention == "decomposed" and FUSED_ATTENTION not in engine.plan
    assert "llama: no fused kernel for its attentions" in printed.getvalue()


@pytest.mark.parametrize(("dtype", "target"), [("fp16", "rtx-sm_89"), ("bf16", "rtx-ampere+")])
def test_int4_weights_stay_int4_in_the_engine(dtype, target, tmp_path):
    """An engine would hold the dense matrices after all, other values, or dequantise them in a kernel of their own."""
    random, trace, graph_target = np.random.default_rng(0), copy_of(traced("llama").trace), TARGETS[target]
    weights = {}
    for name, parameter in traced("llama").model.named_parameters():
        if name.endswith("_proj.weight"):
            (rows, columns), blocks = parameter.shape, (parameter.shape[0], parameter.shape[1] // 32)
            values, scales = random.integers(0, 16, (rows, columns), np.uint8), random.uniform(0.01, 0.02, blocks)
            zeros = random.integers(0, 16, blocks, np.uint8) if "down" in name else None
            weights[name] = QuantizedWeight(4, values, scales.astype(np.float32), zeros)
    context = LoweringContext(SLOTS, weights)
    prepare(trace, graph_target, context)
    graph = lower(trace, graph_target, [], context).graphs[0]
    file = write_graph_file(CutGraph(graph.name, retyped(graph.model, DTYPES[dtype]), graph.layers), tmp_path)
    assert file.operators["DequantizeLinear"] == len(weights) == 7 * LAYERS["llama"]

    settings, quiet = settings_for(*graph_target.machine.compute), ExportProgress(quiet=True)
    plan = build_engine(read_network(trt, file), lambda: read_network(trt, file), settings, quiet, "llama").plan
    for name, weight in weights.items():
        assert pack_nibbles(weight.values ^ 8, 4).tobytes() in plan, name  # signed
    assert plan.count(FUSED_INT4) == len(weights) * len(PROFILES)


def test_engine_inspector_agrees(tmp_path):
    """A loaded engine would report other aliases or profiles than its network has."""
    gpu = present_gpu()
    if gpu is None or f"SM{gpu.compute}" not in trt.ComputeCapability.__members__:
        pytest.skip("loading an engine takes a GPU that TensorRT-RTX knows")
    made, built = build("llama", "fp16", tmp_path, gpu.compute)
    engine = trt.Runtime(made.log).deserialize_cuda_engine(built.plan)
    assert engine.num_optimization_profiles == len(PROFILES) and engine.num_aux_streams == 0
    assert {output: engine.get_aliased_input_tensor(output) for output in made.aliases} == made.aliases
    layers = json.loads(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))["Layers"]
    assert layers
