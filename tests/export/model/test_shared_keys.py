"""Models whose later layers read the keys and values of earlier ones (Gemma 4): text, memory, and what is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures import GEMMA4, VOCAB, WINDOW, random_model
from export.passes.test_padded_attention import PLANS, check
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import Manifest, read_manifest
from tide_runtime.errors import UnsupportedModelError
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig, PreTrainedModel

from tide_export import ExportConfig, export
from tide_export.export import quantize_loaded, write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

SLOTS = 64
QUIET = ExportProgress(quiet=True)


def config(types: str, shared: int, **more: object) -> Gemma4TextConfig:
    """``types``: of the layers, s (sliding) or f (full); the last ``shared`` of them read earlier layers' keys."""
    names = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in types]
    own = {"num_hidden_layers": len(types), "layer_types": names, "hidden_size_per_layer_input": 32}
    return Gemma4TextConfig(
        **{**GEMMA4, **own, **more}, num_kv_shared_layers=shared, vocab_size_per_layer_input=VOCAB, use_cache=True
    )


# Types of layers, layers that share, and the layers whose keys those read.
FORMS: dict[str, tuple[Callable[[], Gemma4TextConfig], dict[int, int]]] = {
    "e2b": (lambda: config("sfsf", 2, use_double_wide_mlp=True, num_key_value_heads=1), {2: 0, 3: 1}),
    "e4b": (lambda: config("sff", 1, attention_k_eq_v=True), {2: 1}),
}


@dataclass(frozen=True)
class Exported:
    model: PreTrainedModel
    directory: Path

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.directory)

    def load(self, **options: object) -> Engine:
        return Engine.load(self.directory, EngineOptions(threads=ThreadOptions(1), **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """``exported(form, weights, kv)``: a verified bundle."""
    made: dict[tuple[str, str, str], Exported] = {}

    def make(form: str, weights: str = "source", kv: str = "model") -> Exported:
        key = form, weights, kv
        if key not in made:
            loaded, directory = LoadedModel(random_model(FORMS[form][0]()), None, form), tmp_path_factory.mktemp(form)
            options = ExportConfig(max_seq_len=SLOTS, weights=weights, kv=kv)
            loaded = quantize_loaded(loaded, weights, options.quantizer, QUIET)
            write_bundle(loaded, directory, options, QUIET)
            made[key] = Exported(loaded.model, directory)
        return made[key]

    return make


@pytest.fixture
def engine(exported: Callable[..., Exported]) -> Iterator[Engine]:
    with exported("e2b").load() as engine:
        yield engine


def prompts() -> list[list[int]]:
    return [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (3, 2 * WINDOW + 1, 11)]


@pytest.mark.parametrize("form", slow_but(FORMS, "e2b"))
def test_texts_are_those_of_generate(exported, form):
    """Layers that read another layer's keys would attend to stale, rotated or foreign ones; or the wrong layer's."""
    case, texts = exported(form), []
    params = GenerationParams(max_new_tokens=24, ignore_eos=True)
    for ids in prompts():
        made = case.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        texts.append(tuple(made[0, len(ids) :].tolist()))
    with case.load() as engine:
        assert [engine.generate(ids, params)[0].token_ids for ids in prompts()] == texts
        assert [one.token_ids for one in engine.generate(prompts(), params)] == texts
    assert all(len(set(text)) > 3 for text in texts), "a constant output would hide most mistakes"


@pytest.mark.parametrize("plan", PLANS)
def test_a_token_has_the_same_bits_in_every_step(engine, plan):
    """A layer would write other bits over the keys that it shares than their own layer wrote."""
    check(engine, PLANS[plan])


@pytest.mark.parametrize("weights, kv", slow_but([("int4", "model"), ("source", "int8")], ("source", "int8")))
def test_few_bits(exported, weights, kv):
    """Rounded keys would be scaled by another layer's range, or per-layer tables keep 32 bits; drafts would change the text."""
    case, params = exported("e2b", weights, kv), GenerationParams(max_new_tokens=24, ignore_eos=True)
    repeated = [ids * 3 for ids in prompts() if len(ids) < WINDOW + 4]
    texts = []
    for policy in ("full", "exact"):
        with case.load(policy=policy) as engine:
            for plan in ("uneven", "drafts"):
                check(engine, PLANS[plan])
            texts.append([one.token_ids for one in engine.generate(repeated, params)])
    assert texts[0] == texts[1]
    assert weights == "source" or "Gather" not in {node.op_type for node in _nodes(case)}


def _nodes(case: Exported) -> list:
    import onnx

    file = case.directory / case.manifest.targets["cpu"].graphs["segment_0"]
    graph = onnx.load(file, load_external_data=False).graph
    return [node for node in graph.node if node.input[0] in {value.name for value in graph.initializer}]


def test_prefixes_and_preemption_leave_the_text(exported):
    """A kept prefix, a moved row or memory that is given back would lose the keys that several layers read."""
    case, params = exported("e2b"), GenerationParams(max_new_tokens=24, ignore_eos=True)
    texts = [[*range(5, 5 + 2 * WINDOW), 40 + n] for n in range(6)]
    with case.load(policy="full", prefix_cache=False) as engine:
        alone = [engine.generate(ids, params)[0].token_ids for ids in texts]
        budget = engine.backend.kv_bytes_per_token * SLOTS * 2
    for options in ({}, {"kv_memory": budget, "max_batch": 4}):
        with case.load(policy="exact", **options) as engine:
            for _ in range(2):
                assert [one.token_ids for one in engine.generate(texts, params)] == alone
            stats = engine.stats()
            assert stats.preemptions if options else stats.prefix_tokens


def test_cuts_and_exits_are_refused_with_the_reason(exported, tmp_path):
    """A graph behind a cut would read keys or token ids that it is not given, after minutes of work."""
    case = exported("e2b")
    assert case.manifest.checkpoints == []
    with pytest.raises(UnsupportedModelError, match="later layers read the keys and values of earlier ones"):
        write_bundle(LoadedModel(case.model, None, "e2b"), tmp_path, ExportConfig(checkpoints="2"), QUIET)
    alone = random_model(config("sf", 0))
    with pytest.raises(UnsupportedModelError, match="each of its layers reads the token ids"):
        write_bundle(LoadedModel(alone, None, "alone"), tmp_path, ExportConfig(checkpoints="1"), QUIET)


@pytest.mark.slow
def test_a_checkpoint_with_images_is_exported_as_text(tmp_path):
    """The files that people have hold vision weights, and keys of layers that read others'; the export would refuse them."""
    text = config("ff", 1, moe_intermediate_size=32, num_experts=4, top_k_experts=2, enable_moe_block=True)
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    whole = Gemma4Config(text_config=text, vision_config={**vision, "num_key_value_heads": 2}, image_token_id=VOCAB - 1)
    torch.manual_seed(0)
    model = Gemma4ForConditionalGeneration(whole).eval()
    state = model.state_dict()
    state["model.language_model.layers.1.self_attn.k_proj.weight"] = torch.zeros(64, 64)
    model.save_pretrained(tmp_path / "model", state_dict=state)
    notes: list[str] = []
    progress = ExportProgress(quiet=True)
    progress.note = notes.append  # type: ignore[method-assign]
    options = ExportConfig(max_seq_len=SLOTS, tokenizer="none")
    manifest = export(str(tmp_path / "model"), tmp_path / "bundle", options, progress=progress)
    assert any("they read images or sound" in note for note in notes)
    assert any("their layers read the keys and values of earlier ones" in note for note in notes)
    assert manifest.kv_sources == {1: 0}
    ids = prompts()[1]
    made = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with Engine.load(tmp_path / "bundle", EngineOptions(threads=ThreadOptions(1))) as engine:
        ours = engine.generate(ids, GenerationParams(max_new_tokens=12, ignore_eos=True))[0]
    assert list(ours.token_ids) == made[0, len(ids) :].tolist()
