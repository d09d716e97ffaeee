"""Every supported architecture, exported unmodified, equals the eager model: logits, greedy tokens, ragged batches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from export.architectures import ARCHITECTURES, VOCAB, WINDOW
from numpy.typing import NDArray
from tide_runtime import Engine, GenerationParams
from tide_runtime.bundle.manifest import UNCUT

MAX_LOGIT_DIFFERENCE = 1e-4  # fp32
NEW_TOKENS = 32
_WINDOWED = {"mistral", "gemma2", "gemma3", "gemma4", "starcoder2", "gpt_oss", "qwen2_moe"}
# Rotary widths or forms that the fused kernel does not take, learned positions, or heads interleaved with Q, K and V.
_ROTARY_NOT_FUSED = {"phi", "gpt_neox", "stablelm", "gpt2", "opt", "helium", "gpt_oss", "deepseek_v3"}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt_logits(engine: Engine, ids: list[int], graphs: Sequence[str] = ()) -> NDArray[np.float32]:
    """Logits [S, V] for every token of a prompt, from an empty cache, by ``graphs``, or by the segments."""
    step = engine.backend.context(1).step(0, [len(ids)], [len(ids)])
    step.input_ids[: len(ids)] = ids
    step.place([0])
    for graph in graphs or [segment.name for segment in engine.manifest.segments]:
        step.run(graph)
    return step.logits[: len(ids)].astype(np.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_logits_equal_eager(exported, name):
    """The bundle would compute other logits for a prompt than the model."""
    case = exported(name)
    ids = prompt(21, seed=1)
    assert len(ids) > 2 * WINDOW
    with torch.no_grad():
        expected = case.model(input_ids=torch.tensor([ids])).logits[0].numpy()
    whole = case.engine.backend.context(1).every_layer
    assert UNCUT in whole
    for graphs in ((), whole):  # one layer each, and all in one graph
        difference = abs(prompt_logits(case.engine, ids, graphs) - expected).max()
        print(f"{name}: max |Δlogit| {difference:.1e}")
        assert difference <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_hf_generate(exported, name):
    """Decode steps, cache updates and positions would drift from the model's own `generate`."""
    case = exported(name)
    ids = prompt(13, seed=2)
    expected = case.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    ours = case.engine.generate(ids, GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))[0]
    assert list(ours.token_ids) == expected[0, len(ids) :].tolist()
    assert len(set(ours.token_ids)) > 1, "a constant output would hide most mistakes"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_batch_equals_one_by_one(exported, name):
    """A request's text would depend on the other requests in its batch."""
    case = exported(name)
    params = GenerationParams(max_new_tokens=12, ignore_eos=True)
    prompts = [prompt(n, seed=n) for n in (3, 17, 9)]
    together = case.engine.generate(prompts, params)
    alone = [case.engine.generate(p, params)[0] for p in prompts]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_target_torch_equals_target_cpu(exported, name):
    """An operator, mask or table of target torch would be another than the model's, alone or in a ragged batch."""
    case = exported(name)
    if "torch" not in case.manifest.targets:
        pytest.skip(f"{name}: target torch is refused")
    ids = prompt(21, seed=1)
    difference = abs(prompt_logits(case.on_torch, ids) - prompt_logits(case.engine, ids)).max()
    print(f"{name}: max |Δlogit| {difference:.1e}")
    assert difference <= MAX_LOGIT_DIFFERENCE
    params = GenerationParams(max_new_tokens=12, ignore_eos=True)
    prompts = [prompt(n, seed=n) for n in (3, 17, 9)]
    on_cpu, on_torch = ([row.token_ids for row in engine.generate(prompts, params)] for engine in (case.engine, case.on_torch))
    assert on_cpu == on_torch


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_lowering_passes_fire(exported, name):
    """An attention or norm left unfused, or lowered twice, would cost speed without failing anything else."""
    case = exported(name)
    applied = case.manifest.targets["cpu"].passes
    assert applied["attention_gqa"] == case.manifest.model.num_layers
    for graphs in ([graph.name for graph in case.manifest.segments], [UNCUT]):
        operators = _operators(case, graphs)
        assert operators.count("GroupQueryAttention") == case.manifest.model.num_layers
        assert ("Cos" in operators) == (name in _ROTARY_NOT_FUSED - {"gpt2", "opt"})


@pytest.mark.parametrize("name", sorted(_WINDOWED))
def test_sliding_window_matters(exported, name):
    """The window tests above would pass vacuously if the model had no window, or one longer than the prompt."""
    case = exported(name)
    text = case.model.config.get_text_config()
    assert text.sliding_window == WINDOW
    ids = prompt(21, seed=1)
    changed = [*ids]
    changed[0] = (ids[0] + 1) % VOCAB
    with torch.no_grad():
        far, near = (case.model(input_ids=torch.tensor([x])).logits[0] for x in (ids, changed))
    assert (far[0] - near[0]).abs().max() > 1e-3  # token 0 sees the change


def _operators(case, graphs: list[str]) -> list[str]:
    import onnx

    operators = []
    for name in graphs:
        path = case.engine.bundle.path(case.manifest.targets["cpu"].graphs[name])
        operators += [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    return operators
