"""Bundles with int8 KV caches: their scales, what they compute, and what verification finds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures import FEW_LAYERS, LAYERS, MAX_POSITIONS, VOCAB, tiny_model
from export.passes.test_padded_attention import PLANS, check
from runtime.backends.torch.test_backend import SimulatedStream
from runtime.simulated_gpu import SimulatedGpu
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.pass_costs import pass_table
from tide_runtime.backends.required_memory import required_memory
from tide_runtime.backends.step_arrays import NO_PADDING
from tide_runtime.backends.torch.backend import TorchBackend
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import KVInfo, LayerInfo, read_manifest
from tide_runtime.errors import ParamsError, TargetError, UnsupportedModelError, VerificationError
from transformers.cache_utils import Cache, DynamicLayer

from tide_export import ExportConfig, export
from tide_export.export import write_bundle
from tide_export.model.probe import probe_layers
from tide_export.progress import ExportProgress
from tide_export.quantize.kv_scales import KVScales, kv_scales
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.check_results import GraphCheck, PromptCheck
from tide_export.verify.verify_bundle import verify_bundle

# Rotary fused and partial, learned positions, windows and soft-caps, sinks, multi-head.
NAMES = ("llama", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt2", "phi")))
SLOTS = MAX_POSITIONS // 2
CONFIG = ExportConfig(checkpoints="1", max_seq_len=SLOTS, kv="int8", targets=("cpu", "torch"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LoadedModel, Path]]:
    """``exported(architecture)``: a model and its bundle with int8 caches, verified."""
    made: dict[str, tuple[LoadedModel, Path]] = {}

    def make(name: str) -> tuple[LoadedModel, Path]:
        if name not in made:
            loaded, directory = LoadedModel(tiny_model(name, layers=FEW_LAYERS), None, name), tmp_path_factory.mktemp(name)
            write_bundle(loaded, directory, CONFIG, ExportProgress(quiet=True))
            made[name] = loaded, directory
        return made[name]

    return make


@pytest.fixture
def load(exported: Callable[[str], tuple[LoadedModel, Path]]) -> Iterator[Callable[..., Engine]]:
    """``load(architecture, policy=…)``: an engine on its bundle, of one thread."""
    opened: list[Engine] = []

    def make(name: str, **options: object) -> Engine:
        chosen = EngineOptions(threads=ThreadOptions(1), **options)  # type: ignore[arg-type]
        opened.append(Engine.load(exported(name)[1], chosen))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def scales_of(loaded: LoadedModel) -> dict[int, KVScales]:
    return kv_scales(loaded.model, probe_layers(loaded.model), SLOTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_bundle_computes_what_the_eager_model_does_over_a_rounded_cache(exported, name):
    """Clipped keys and values would ship as a worse model, or right bundles would be refused."""
    loaded, directory = exported(name)
    scales = scales_of(loaded)
    checks = verify_bundle(loaded, directory, "fp32", scales)
    exact = [check for check in checks if isinstance(check, GraphCheck)]
    rounded = [check for check in checks if isinstance(check, PromptCheck)]
    assert len(exact) == 3 and all(check.tolerance is None for check in rounded)
    assert max(check.divergence for check in rounded) < 0.02
    assert exact[-1].max_difference < max(check.max_difference for check in rounded) / 10
    wrong = {number: KVScales(one.key / 10, one.value / 10) for number, one in scales.items()}
    with pytest.raises(VerificationError, match="differs from the eager model"):
        verify_bundle(loaded, directory, "fp32", wrong)


def test_caches_take_a_byte_a_number(exported, load):
    """The memory that the option is for would not be saved, or its manifest would say otherwise."""
    manifest = read_manifest(exported("llama")[1])
    assert (manifest.kv_dtype, manifest.cache_dtype, manifest.dtype) == ("int8", "int8", "fp32")
    caches = {t.name: t.dtype for g in manifest.segments for t in (*g.inputs, *g.outputs) if "_cache_" in t.name}
    assert len(caches) == 4 * FEW_LAYERS and set(caches.values()) == {"int8"}
    context = load("llama").backend.context(2)
    assert {array.dtype for array in context.caches.arrays.values()} == {np.dtype(np.int8)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_every_step(load, name, plan):
    """Sequences of a batch, or drafts verified together, would round keys to other numbers than alone."""
    check(load(name), PLANS[plan])


@pytest.mark.parametrize("policy", ["full", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_target_torch_rounds_as_target_cpu_does(exported, load, name, policy, tmp_path, monkeypatch):
    """Breaks: on a GPU a text over int8 caches is another than the verified one: numbers go by the scale of another channel or
    by half, or caches that grow in captured steps are moved by the size of other numbers."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    bundle = Bundle.open(exported(name)[1])
    backend = TorchBackend(bundle, "torch", SimulatedStream(SimulatedGpu()))
    backend.min_slots, backend.machine_key, backend.row_padding = 16, ["the simulated GPU"], NO_PADDING
    passes = {(tokens,) * rows: 1 + tokens / 100 for rows in (1, 2) for tokens in (1, 4, 16)}
    backend.pass_costs = pass_table(passes, "torch", "prices at which drafts pay")
    prompts = [np.random.default_rng(n).integers(3, VOCAB, n + 1).tolist() * 4 for n in range(3)]
    params, on_cpu = GenerationParams(max_new_tokens=24, ignore_eos=True), load(name, policy="full")
    with Engine(bundle, EngineOptions(target="torch", policy=policy, max_batch=2), backend=backend) as engine:
        texts = engine.generate(prompts, params)
        assert any(text.stats.drafted for text in texts) == (policy == "exact")
    assert [text.token_ids for text in texts] == [text.token_ids for text in on_cpu.generate(prompts, params)]
    assert backend.kv_bytes_per_token == on_cpu.backend.kv_bytes_per_token
    assert required_memory(bundle, "torch").row == backend.kv_bytes_per_token * SLOTS


def test_more_threads_than_heads_leave_drafts_their_bits(exported):
    """ONNX Runtime would divide the cache of a single row over idle threads, and sum in another order than for several rows."""
    loaded, directory = exported("llama")
    heads = loaded.model.config.num_attention_heads
    for threads in (heads, heads + 1):
        with Engine.load(directory, EngineOptions(policy="full", threads=ThreadOptions(threads))) as engine:
            assert engine.backend.row_padding is not None


def test_scales_cover_the_range_of_every_position():
    """Rotary embeddings turn keys into channels that are small at the start of the cache; they would be clipped."""
    model, ids = tiny_model("llama"), torch.from_numpy(np.random.default_rng(1).integers(3, VOCAB, (1, 20)))
    scales = scales_of(LoadedModel(model, None, "llama"))
    assert all((one.key > 0).all() and (one.value > 0).all() for one in scales.values())
    for start in (0, SLOTS // 2, SLOTS - 20):
        cache, places = Cache(layers=[DynamicLayer() for _ in scales]), start + torch.arange(20)[None]
        with torch.no_grad():
            model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True)
        for layer, one in zip(cache.layers, scales.values(), strict=True):
            for held, by_channel in ((layer.keys, one.key), (layer.values, one.value)):
                assert (held[0].abs().amax(1).numpy() <= 127 * by_channel).mean() > 0.99


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_cache_of_another_shape_is_refused(name):
    """Scales of latents would be taken for those of the keys that are expanded from them, or go to the wrong heads."""
    with pytest.raises(UnsupportedModelError, match="leave out --kv int8"):
        kv_scales(tiny_model(name), [LayerInfo(KVInfo(3, 16, 16))] * LAYERS, SLOTS)


def test_options_that_cannot_be_met_end_at_once(tmp_path):
    """The user would wait for minutes, or get a bundle in another precision than asked for."""
    with pytest.raises(ParamsError, match="kv is 'int4'; set it to one of: model, int8"):
        ExportConfig(kv="int4")
    with pytest.raises(TargetError, match="target cuda has no attention over int8 KV caches; leave out --kv int8"):
        export("no/model", tmp_path / "out", ExportConfig(targets=("cuda",), kv="int8", dtype="fp16"))
