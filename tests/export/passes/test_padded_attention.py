"""One form of a segment serves all steps on the CPU: a token's logits have the same bits alone, in chunks and in company."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from export.architectures import FEW_LAYERS, MAX_POSITIONS, VOCAB, WINDOW, tiny_model
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

# Rotary fused and partial, learned positions, windows, soft-caps, biased and packed projections; 1, 2 and 4 heads a KV head;
# sinks; keys and values expanded from latents; experts.
NAMES = ("llama", "gemma2", "gemma3", "mistral", "gpt2", "phi", "falcon", "mixtral", "gpt_oss", "deepseek_v3")
TOKENS = 3 * WINDOW + 6  # of each text
# Tokens of each sequence, step by step.
PLANS: dict[str, list[list[int]]] = {
    "prompt at once": [[TOKENS]],
    "chunks": [[7], [1], [12], [10]],
    "drafts": [[3]] * 10,
    "decoded together": [[1, 1, 1]] * TOKENS,
    "prompts together": [[TOKENS] * 3],
    "uneven": [[20, 1, 3], [1, 9, 25], [9, 20, 2]],
    "beside sequences without tokens": [[1, 0, 17], [0, 20, 1], [20, 0, 1], [9, 10, 11]],
}


def text(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(3, VOCAB, TOKENS)


def logits(
    engine: Engine,
    plan: Sequence[Sequence[int]],
    first: int = 0,
    graphs: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
) -> list[list[bytes]]:
    """Run texts from number ``first`` on as ``plan`` says. Returns the bits of each text's logits, token by token.

    ``graphs``: that together run all layers; None: those of policy ``full``. ``offsets``: of each text's positions.
    """
    context, texts = engine.backend.context(len(plan[0])), [text(first + number) for number in range(len(plan[0]))]
    if offsets is not None:
        context.position_offsets[:] = offsets
    done, rows = [0] * len(texts), [list[bytes]() for _ in texts]
    for counts in plan:
        step = context.step(0, counts, counts)
        step.input_ids[: sum(counts)] = np.concatenate([t[d : d + n] for t, d, n in zip(texts, done, counts, strict=True)])
        step.place(done)
        for graph in graphs or context.every_layer:
            step.run(graph)
        place = 0
        for number, count in enumerate(counts):
            rows[number] += [row.tobytes() for row in step.logits[place : place + count]]
            place, done[number] = place + count, done[number] + count
    context.close()
    return rows


def check(engine: Engine, plan: Sequence[Sequence[int]]) -> None:
    """Assert that every text has the bits that it has token by token."""
    for number, rows in enumerate(logits(engine, plan)):
        alone = logits(engine, [[1]] * TOKENS, first=number)[0]
        assert rows == alone[: len(rows)] and len(set(alone)) == TOKENS


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_every_step(exported, name, plan):
    """A text would depend on its company, on the size of prompt chunks, or on how many drafts are verified with it."""
    check(exported(name).engine, PLANS[plan])


@pytest.mark.parametrize("name", NAMES)
def test_segments_have_the_bits_of_the_uncut_graph(exported, name):
    """Drafts are verified in segments: policy `exact` would choose otherwise than `full`, which runs the uncut graph."""
    engine, plan = exported(name).engine, PLANS["chunks"]
    assert logits(engine, plan) == logits(engine, plan, graphs=[segment.name for segment in engine.manifest.segments])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_oss"])
def test_only_a_sequences_own_rows_are_cached(exported, name):
    """Keys and values of a sequence without tokens, which another may share, would be overwritten with padding."""
    context, filled, counts = exported(name).engine.backend.context(4), [9, 20, 0, 3], [3, 0, 1, 8]
    for array in context.caches.arrays.values():
        array[:] = 0.5
    step = context.step(0, counts)
    step.input_ids[: sum(counts)] = 7
    step.place(filled)
    for segment in exported(name).manifest.segments:
        step.run(segment.name)
    for array in context.caches.arrays.values():
        written = (array != 0.5).any(axis=(1, 3))  # [B, slots]
        for row, start, rows in zip(written, filled, [4, 0, 2, 9], strict=True):  # its tokens and a row of padding
            assert np.flatnonzero(row).tolist() == list(range(start, start + rows))
    context.close()


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral"])
def test_threads_leave_the_bits(exported, name, threads):
    """More threads than heads would divide a sequence's keys, and sum them in another order for several rows than for one."""
    options = EngineOptions(policy="full", threads=ThreadOptions(threads))
    with Engine.load(exported(name).engine.bundle.directory, options) as engine:
        for plan in ("prompt at once", "uneven", "beside sequences without tokens"):
            check(engine, PLANS[plan])


@pytest.mark.parametrize("name", slow_but(["llama", "gemma2"], "llama"))
def test_half_precision(tmp_path, name):
    """ONNX Runtime has another kernel for fp16, which would fail, or sum otherwise in company."""
    config = ExportConfig(dtype="fp16", checkpoints="1", max_seq_len=MAX_POSITIONS // 2, verify=False)
    model = tiny_model(name, torch.float16, layers=FEW_LAYERS)
    write_bundle(LoadedModel(model, None, name), tmp_path, config, ExportProgress(quiet=True))
    with Engine.load(tmp_path, EngineOptions(threads=ThreadOptions(1))) as engine:
        for plan in PLANS.values():
            check(engine, plan)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_has_one_form_of_every_segment(exported, name):
    """The runtime would load a second copy of graphs, or choose by the number of sequences what a token computes."""
    case = exported(name)
    target = case.manifest.targets["cpu"]
    assert set(target.graphs) == {"segment_0", "segment_1", "uncut", "head"}
    assert target.passes["pad_attention"] == FEW_LAYERS and target.pads_attention
    for graph in ("segment_0", "uncut"):
        file = case.engine.bundle.path(target.graphs[graph])
        read = {value.name for value in onnx.load(file, load_external_data=False).graph.input}
        assert {"query_seqlens", "padded_rows", "packed_rows"} <= read and not any("bias" in name for name in read)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_text_fills_the_cache_to_its_last_slot(exported, name):
    """The second row of the last token would not fit, and the text would end one token early."""
    slots = exported(name).manifest.max_seq_len
    (generation,) = exported(name).engine.generate([[5, 6, 7]], GenerationParams(max_new_tokens=slots - 3, ignore_eos=True))
    assert generation.stats.new_tokens == slots - 3


@pytest.mark.filterwarnings("error")  # the caller chose it
def test_fast_bits_leave_the_padding_out(exported):
    """A single sequence would still compute padding under `fast`, or its text be reported as independent of others."""
    same = exported("llama").engine
    with same.with_options(replace(same.options, bits="fast")) as fast:
        step = fast.backend.context(1).step(0, [1], [1])
        assert (step.shape.tokens, step.shape.seq) == (1, 1)
        assert fast.row_padding is None and str(fast.bits_limitation).startswith("bits is fast")
        assert "tide_same_bits 0" in fast.metrics()
        params = GenerationParams(max_new_tokens=5, ignore_eos=True)
        assert fast.generate([5, 6, 7], params)[0].token_ids == same.generate([5, 6, 7], params)[0].token_ids
        with fast.with_options(replace(same.options, bits="same")) as again:
            assert again.row_padding == same.row_padding is not None and again.bits_limitation is None
