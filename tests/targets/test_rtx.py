"""Segments compiled by TensorRT-RTX without the GPU: the parsed network and the built engine."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from targets.tiny_graphs import DTYPES, LAYERS, SLOTS, copy_of, retyped, segment, traced
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu

from tide_export.cut import CutGraph
from tide_export.lower import lower, prepare
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.quantization.quantized_weight import QuantizedWeight, pack_nibbles
from tide_export.targets import TARGETS
from tide_export.targets.attention_repair import attentions, layers_of, repair_attentions
from tide_export.targets.build_log import require_no_errors
from tide_export.targets.engine_build import BuildSettings, build_engine
from tide_export.targets.engine_cache import BuiltEngine
from tide_export.targets.engine_network import EngineNetwork, read_network
from tide_export.targets.graph_files import write_graph_file
from tide_export.targets.step_profiles import step_profiles

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'tide-llm[rtx]'")

# Attentions with a window of 8 tokens are masked; Gemma-2's have a soft-cap, which the fused ones refuse.
FUSED = {"llama": "causal", "qwen3": "causal", "gpt2": "causal", "mistral": "masked"}
ALL = [*FUSED, "gemma2"]
# Every GPU that has a target of its own is compiled for once or twice; Turing has no bf16.
GPUS = {"fp16": (75, 80, 86, 89, 120), "bf16": (121, 89, 120, 80, 86)}
PROFILES = step_profiles(max_batch=4, draft_limit=4, max_seq_len=SLOTS)
# What a fused attention is in the plan of TensorRT-RTX 1.7: one such kernel for each profile.
FUSED_KERNEL = b"struct _gemm_mha_v2_callback {"
FUSED_INT4 = b"runtime_fusion={ name=__myl_ReplCastMulCastFc"  # a product that dequantises its weight on the way


def network(name: str, dtype: str, folder: Path, repair=repair_attentions) -> EngineNetwork:
    return read_network(trt, write_graph_file(segment(name, dtype), folder), repair)


def build(
    name: str, dtype: str, folder: Path, compute: int = 89, progress: ExportProgress | None = None
) -> tuple[EngineNetwork, BuiltEngine]:
    def configure(module, config) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(module.ComputeCapability, f"SM{compute}"), 0)

    made, settings = network(name, dtype, folder), BuildSettings(PROFILES, configure)
    reparse = partial(network, name, dtype, folder)
    return made, build_engine(made, reparse, settings, progress or ExportProgress(quiet=True), name)


@pytest.mark.parametrize(
    ("name", "dtype", "compute"),
    [(name, dtype, compute) for dtype, gpus in GPUS.items() for name, compute in zip(ALL, gpus, strict=True)],
)
def test_segment_compiles(name, dtype, compute, tmp_path):
    """An engine would attend to the wrong slots, copy its caches, lack a kind of step, or hide an error in the log."""
    made, engine = build(name, dtype, tmp_path, compute)
    found = attentions(trt, made.network)
    assert len(found) == made.attentions == (LAYERS[name] if name in FUSED else 0)
    lower_right, none = trt.CausalMaskKind.LOWER_RIGHT, trt.CausalMaskKind.NONE
    for attention in found:
        assert attention.causal_kind == (lower_right if FUSED[name] == "causal" else none)
        assert (attention.mask is not None) == (FUSED[name] == "masked")
        assert attention.key_value_lengths.name == "kv_lengths" and attention.key_value_lengths.dtype == trt.int32
        assert not attention.decomposable
    caches = {f"{kind}_cache_out_{i}": f"{kind}_cache_{i}" for kind in ("key", "value") for i in range(LAYERS[name])}
    assert made.aliases == caches
    inputs = {tensor.name: tensor for tensor in made.inputs}
    assert set(inputs) == {"input_ids", "position_ids", "write_index", "logits_index", *caches.values()}
    assert {tensor.dtype for tensor in made.inputs if "cache" in tensor.name} == {dtype}
    assert inputs["key_cache_0"].shape[2] == SLOTS and inputs["write_index"].dtype == "int64"
    require_no_errors(made.log, name)
    assert engine.attention == ("fused" if name in FUSED else "none")
    assert engine.plan.count(FUSED_KERNEL) == len(found) * len(PROFILES)
    assert b"[profile 1]" in engine.plan and b"[profile 2]" not in engine.plan


def test_lengths_count_the_tokens_of_the_step(tmp_path):
    """Valid slots without the step's own tokens: each would attend to those before it, and not to itself."""
    made = network("llama", "fp16", tmp_path)
    [cast] = [layer for layer in _layers(made) if layer.get_output(0).name == "kv_lengths"]
    [total] = layers_of(made.network, trt.LayerType.ELEMENTWISE, trt.IElementWiseLayer)[-1:]
    assert total.op == trt.ElementWiseOperation.SUM and total.get_output(0).name == cast.get_input(0).name
    assert total.get_input(0).name == "write_index"
    [count] = [layer for layer in _layers(made) if layer.get_output(0).name == total.get_input(1).name]
    [shape] = [layer for layer in _layers(made) if layer.get_output(0).name == count.get_input(0).name]
    assert shape.type == trt.LayerType.SHAPE and shape.get_input(0).name == "input_ids"


def _layers(made: EngineNetwork) -> list:
    return [made.network.get_layer(i) for i in range(made.network.num_layers)]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_without_the_repair_nothing_is_built(name, tmp_path):
    """A parser that drops lengths and causal kind would silently give engines with wrong attention."""
    with pytest.raises(TargetError, match="UPPER_LEFT" if name == "llama" else "how many cache slots"):
        network(name, "fp16", tmp_path, repair=lambda *_: None)


def test_half_a_repair_is_none(tmp_path):
    """Causal from the right corner, but over all slots of the cache: decoding would read what was never written."""

    def causal_only(module, parsed) -> None:
        for attention in attentions(module, parsed):
            attention.causal_kind = module.CausalMaskKind.LOWER_RIGHT

    with pytest.raises(TargetError, match="how many cache slots"):
        network("llama", "fp16", tmp_path, repair=causal_only)


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
    assert engine.attention == "decomposed" and engine.plan.count(FUSED_KERNEL) == 0
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

    def configure(module, config) -> None:
        config.num_compute_capabilities = len(graph_target.machine.compute)
        for place, compute in enumerate(graph_target.machine.compute):
            config.set_compute_capability(getattr(module.ComputeCapability, f"SM{compute}"), place)

    settings, quiet = BuildSettings(PROFILES, configure), ExportProgress(quiet=True)
    plan = build_engine(read_network(trt, file), lambda: read_network(trt, file), settings, quiet, "llama").plan
    for name, weight in weights.items():
        assert pack_nibbles(weight.values ^ 8, 4).tobytes() in plan, name  # signed
    assert plan.count(FUSED_INT4) == len(weights) * len(PROFILES)


def test_errors_in_the_log_are_fatal(tmp_path):
    """TensorRT calls some wrong networks built, with nothing but a line in its log."""
    made = network("llama", "fp16", tmp_path)
    made.log.log(trt.ILogger.WARNING, "a warning")
    require_no_errors(made.log, "building it")
    made.log.log(trt.ILogger.ERROR, "something\n  went wrong")
    with pytest.raises(TargetError, match="building it: TensorRT reports something went wrong"):
        require_no_errors(made.log, "building it")


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
