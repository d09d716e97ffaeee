"""LoRA adapters at serving time: the logits of PEFT, and texts that do not depend on the adapters of others."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from export.architectures import VOCAB, tiny_model
from export.conftest import Exported
from peft import LoraConfig, PeftModel, get_peft_model
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.step_arrays import NO_PADDING
from tide_runtime.errors import AdapterError, ParamsError, TideError
from tide_runtime.outputs import Generation
from transformers import PreTrainedModel

from tide_export.config import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)
OPTIONS = EngineOptions(target="cpu", policy="full", max_batch=4, threads=ThreadOptions(1))
ASKED = GenerationParams(max_new_tokens=12, logprobs=VOCAB, ignore_eos=True)
TOLERANCE = 1e-4  # of log-probabilities in fp32


def adapt(model: PreTrainedModel, folder: Path, seed: int, **settings: object) -> PeftModel:
    """Save an adapter of random matrices for a copy of ``model``, and return the adapted copy."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **settings})
    adapted = get_peft_model(deepcopy(model), config).eval()
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def check_logprobs(model: PeftModel, generation: Generation, prompt: Sequence[int]) -> None:
    """The log-probabilities of all tokens at each place are those of ``model``."""
    ids = [*prompt, *generation.token_ids]
    wanted = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1).numpy()
    for place, entry in enumerate(generation.logprobs, len(prompt) - 1):
        for token, logprob in entry.top:
            assert abs(logprob - wanted[place, token]) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_logits_are_those_of_peft(exported: Callable[[str], Exported], tmp_path: Path, name: str) -> None:
    """Breaks: matrices beside the wrong product, the wrong part of a fused one, or with the wrong scale."""
    made = exported(name)
    peft = adapt(made.model, tmp_path / "a", 1, rank_pattern={"o_proj": 7}, alpha_pattern={"down_proj": 3}, use_rslora=True)
    adapt(made.model, tmp_path / "b", 2)
    adapters = {"b": tmp_path / "b", "a": tmp_path / "a"}
    with made.engine.with_options(replace(made.engine.options, policy="full", adapters=adapters)) as engine:
        prompt = np.random.default_rng(0).integers(3, VOCAB, 9).tolist()
        found = engine.generate(prompt, replace(ASKED, adapter="a"))[0]
        check_logprobs(peft, found, prompt)
        assert found.logprobs != made.engine.generate(prompt, ASKED)[0].logprobs  # the adapter changes the text


@pytest.fixture(scope="module", params=["source", "int4"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the adapters a, on all modules, and b, on few of them in another rank."""
    folder, model = tmp_path_factory.mktemp("adapters"), tiny_model("llama")
    adapt(model, folder / "a", 1)
    adapt(model, folder / "b", 2, r=20, target_modules=["v_proj", "up_proj"])
    loaded = LoadedModel(model, None, "llama")
    config = ExportConfig(checkpoints="2", max_seq_len=64, verify=False, targets=("cpu",), weights=request.param)
    (folder / "bundle").mkdir()
    write_bundle(quantize_loaded(loaded, config.weights, "rtn", QUIET), folder / "bundle", config, QUIET)
    adapters = {name: folder / name for name in "ab"}
    with Engine.load(folder / "bundle", replace(OPTIONS, max_batch=1, prefix_cache=False, adapters=adapters)) as engine:
        yield engine


def test_company_leaves_the_bits(engine: Engine) -> None:
    """Breaks: a text that changes with the adapters of the others in its batch, with its chunks, or with drafts."""
    random = np.random.default_rng(0)
    names = ["a", None, "b", "a", "b", None]
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (1, 2, 17, 9, 5, 17)]
    params = [replace(ASKED, adapter=name) for name in names]
    alone = [engine.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
    for policy, chunk in (("full", 512), ("full", 7), ("exact", 512)):
        options = replace(engine.options, policy=policy, max_batch=4, prefill_chunk=chunk, depth=DepthOptions(draft_limit=4))
        with engine.with_options(options) as other:
            handles = [other.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
            for handle, wanted in zip(handles, alone, strict=True):
                found = handle.result()
                assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_one_adapter_alone_has_a_graph_of_its_own(engine: Engine) -> None:
    """Breaks: steps that read the matrices of adapters that no token has; texts that depend on company where such graphs differ
    from that of all."""
    backend = cast(OnnxRuntimeBackend, engine.backend)
    view = backend.with_adapters(list(reversed(backend.adapters)))
    assert list(view.adapted) == ["adapted", "adapted_1", "adapted_2"]
    prompt, options = [5, 6, 7], replace(engine.options, bits="fast", adapters=dict(reversed(engine.options.adapters.items())))
    view.adapted = {form: session for form, session in view.adapted.items() if form != "adapted"}
    with Engine(engine.bundle, options, backend=view) as other:
        for name in "ab":
            wanted, found = (one.generate(prompt, replace(ASKED, adapter=name))[0] for one in (engine, other))
            assert found.token_ids == wanted.token_ids
            values = ([one.logprob for one in text.logprobs] for text in (found, wanted))
            np.testing.assert_allclose(*values, atol=TOLERANCE)
    view = backend.with_adapters(list(reversed(backend.adapters)))
    view.measure_padding = lambda one: None if len(one.adapted) > 1 else NO_PADDING
    assert view.row_padding == NO_PADDING and list(view.adapted) == ["adapted"]


def test_prefixes_of_adapters_stay_apart(engine: Engine) -> None:
    """Breaks: a text that goes on from keys and values of another adapter."""
    prompt = np.random.default_rng(1).integers(3, VOCAB, 40).tolist()
    asked = [replace(ASKED, adapter=name) for name in ("a", "b", None)]
    alone = [engine.generate(prompt, one)[0] for one in asked]
    with engine.with_options(replace(engine.options, prefix_cache=True)) as other:
        for _ in range(2):
            for one, wanted in zip(asked, alone, strict=True):
                found = other.generate(prompt, one)[0]
                assert found.logprobs == wanted.logprobs
        assert found.stats.prefix_tokens > 0


def test_what_cannot_be_done_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Breaks: an adapter that is ignored, or one of another model."""
    with pytest.raises(ParamsError, match="adapter is 'c', the engine has: a, b"):
        engine.generate([5], GenerationParams(adapter="c"))
    for policy, depth in (("exit", DepthOptions()), ("exact", DepthOptions(draft="router"))):
        with pytest.raises(ParamsError, match="adapters"):
            engine.with_options(replace(engine.options, policy=policy, depth=depth))

    def refused(model: str, why: str, **settings: object) -> None:
        folder = tmp_path / why.replace(" ", "")
        adapt(tiny_model(model), folder, 1, **settings)
        with pytest.raises(TideError, match=why):
            engine.with_options(replace(engine.options, adapters={"c": folder}))

    refused("gemma", r"q_proj\[128,64\]", target_modules=["q_proj"])  # in another shape
    refused("gpt2", r"adapts transformer\.h\.0.*c_attn")
    refused("llama", "lm_head", target_modules=["lm_head"])
    with pytest.raises(AdapterError, match="adapter_config"):
        engine.with_options(replace(engine.options, adapters={"c": tmp_path}))
