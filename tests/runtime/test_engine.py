"""The engine computes what the eager model computes, whatever the batch, the caller's threads, or how it is asked."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edited_bundle import edit, manifest_of, sign
from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, Grammar, ThreadOptions
from tide_runtime.errors import ParamsError, PromptError, TargetError
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS = ["def add(a, b):", "class", "x", "    def __init__(self, x, y):\n        self.x = x", "return a + b\n"]
MAX_SEQ_LEN = 64
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def add?"}]


def params(count: int = 12, **changes: object) -> GenerationParams:
    return GenerationParams(**{"max_new_tokens": count, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def reference_greedy(model: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """A plain loop over the whole sequence: no cache, no batching, nothing to get wrong."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def tokens(generation: Generation) -> list[int]:
    return list(generation.token_ids)


# --- The model's own output


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_the_eager_model_token_for_token(
    engine: Engine, hf_model: LlamaForCausalLM, hf_tokenizer: PreTrainedTokenizerFast, prompt: str
) -> None:
    ids = hf_tokenizer(prompt).input_ids
    [result] = engine.generate(prompt, params(16))
    assert tokens(result) == reference_greedy(hf_model, ids, 16)
    assert result.text == hf_tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert (result.finish_reason, result.stats.prompt_tokens, result.stats.new_tokens) == ("length", len(ids), 16)


def test_logprobs_are_the_eager_log_softmax(engine: Engine, hf_model: LlamaForCausalLM) -> None:
    ids = [5, 40, 99, 7]
    [result] = engine.generate(ids, params(6, logprobs=3))
    with torch.no_grad():
        logits = hf_model(torch.tensor([ids + tokens(result)])).logits[0, len(ids) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), -1)
    assert len(result.logprobs) == 6
    for step, entry in enumerate(result.logprobs):
        assert entry.token == result.token_ids[step]
        assert entry.logprob == pytest.approx(float(wanted[step, entry.token]), abs=1e-4)
        values, best = wanted[step].topk(3)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_streamed_chunks_carry_the_log_probability_of_their_token(engine: Engine) -> None:
    """Breaks: a client of a stream sees another token's probability, or none."""
    chunks = list(engine.stream([5, 40, 99, 7], params(6, logprobs=3)))
    assert chunks[-1].generation is not None
    assert tuple(chunk.logprob for chunk in chunks) == chunks[-1].generation.logprobs
    assert all(chunk.logprob is None for chunk in engine.stream([5, 40, 99, 7], params(3)))


def test_a_chat_becomes_the_ids_of_apply_chat_template(engine: Engine, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = hf_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert engine.chat_prompt(CHAT) == wanted
    assert len(engine.generate(engine.chat_prompt(CHAT), params(3))[0].token_ids) == 3


def test_text_and_token_ids_are_the_same_prompt(engine: Engine, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = hf_tokenizer(PROMPTS[0]).input_ids
    for same in (ids, tuple(ids), np.array(ids), np.array(ids, np.int32)):
        assert tokens(engine.generate(same, params())[0]) == tokens(engine.generate(PROMPTS[0], params())[0])


# --- Batches


@pytest.mark.parametrize("options", [{"max_batch": 1}, {"max_batch": 2}, {"max_batch": 16}, {"prefill_chunk": 3}])
def test_a_ragged_batch_is_each_prompt_alone(load: Callable[..., Engine], engine: Engine, options: dict[str, Any]) -> None:
    """Five prompts of different length share two slots: rows join and leave, caches move between slots, and a long prompt is
    prefilled in chunks."""
    alone = [tokens(engine.generate(prompt, params(14))[0]) for prompt in PROMPTS]
    with load(**options) as batched:
        assert [tokens(r) for r in batched.generate(PROMPTS, params(14))] == alone


# --- Streaming


def test_streamed_text_is_the_whole_text(engine: Engine) -> None:
    for prompt in PROMPTS:
        [whole] = engine.generate(prompt, params(20))
        chunks = list(engine.stream(prompt, params(20)))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(chunk.token_id for chunk in chunks) == whole.token_ids
        assert [chunk.generation is not None for chunk in chunks] == [False] * 19 + [True]
        last = chunks[-1].generation
        assert last is not None and (last.text, last.finish_reason) == (whole.text, "length")


# --- Endings


def test_every_eos_id_of_the_model_ends_the_text(engine: Engine) -> None:
    """The model's generation config names two (0 and 2); chat models often end with the second."""
    assert engine.manifest.generation.eos_token_ids == [0, 2]
    free = tokens(engine.generate(PROMPTS[0], params(20))[0])
    for at in (2, 7):
        assert free[at] not in free[:at]
        [ended] = engine.generate(PROMPTS[0], params(20, ignore_eos=False, eos_token_ids=(1, free[at])))
        assert tokens(ended) == free[: at + 1]
        assert ended.finish_reason == "eos"
        assert ended.text == engine.tokenizer.decode(free[:at])  # type: ignore[union-attr]


def test_a_stop_string_across_tokens_is_cut_off(engine: Engine) -> None:
    """The stop string begins inside one token and ends inside another; none of it may be shown."""
    chunks = list(engine.stream(PROMPTS[0], params(24)))
    text = "".join(chunk.text for chunk in chunks)
    pieces = [chunk.text for chunk in chunks]
    at = next(i for i in range(4, 20) if pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i] and pieces[i + 1])
    stop = pieces[at][-1] + pieces[at + 1][0]
    [stopped] = engine.generate(PROMPTS[0], params(24, stop=("never there", stop)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    assert len(stopped.token_ids) <= at + 2
    streamed = "".join(chunk.text for chunk in engine.stream(PROMPTS[0], params(24, stop=(stop,))))
    assert streamed == stopped.text


@pytest.mark.parametrize(
    ("prompt", "count", "given", "reason"),
    [
        *((10, count, count, "length") for count in (1, 2, 5)),
        (60, 5, 5, "length"),  # the last token needs no slot
        *((length, 1000, MAX_SEQ_LEN + 1 - length, "cache_full") for length in (1, 50, MAX_SEQ_LEN - 1, MAX_SEQ_LEN)),
    ],
)
def test_texts_end_at_their_limit_or_with_the_cache(
    engine: Engine, hf_model: LlamaForCausalLM, prompt: int, count: int, given: int, reason: str
) -> None:
    """A token too many or too few, or an early end of a text that fits exactly."""
    ids = [(7 * i) % 200 + 3 for i in range(prompt)]
    [result] = engine.generate(ids, params(count))
    assert (len(result.token_ids), result.finish_reason) == (given, reason)
    assert tokens(result) == reference_greedy(hf_model, ids, given)


# --- Bad prompts


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([5] * (MAX_SEQ_LEN + 1), "65 tokens"),
        ("x" * 100, "shorten it, or export with --max-seq-len 100 or more .tide-run and tide-serve take it"),
        ("x" * 500, "at most 128 tokens, the positions that the model knows, and export with --max-seq-len 128"),
        ([5, 100_000], "100000"),
        ([-1, 5], "-1"),
        ([5, 1.5], "1.5"),
        ([1.5, 5], "1.5"),
        (["fine", None], "None"),
        (None, "None"),
        (b"def", "expected text"),
        ("\ud800", "Unicode"),
    ],
)
def test_a_bad_prompt_is_explained(engine: Engine, prompt: object, words: str) -> None:
    """The prompts beside it would run, or a stream report it at its first token, when a server has sent its headers."""
    before = dict(engine.backend.launches)
    with pytest.raises(PromptError, match=words):
        engine.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(PromptError):
        engine.generate([PROMPTS[0], prompt])  # type: ignore[list-item]
    with pytest.raises(PromptError):
        engine.stream([] if isinstance(prompt, list) else prompt)  # type: ignore[arg-type]
    assert dict(engine.backend.launches) == before


# --- Sampling


def test_a_seeds_text_does_not_depend_on_its_company(load: Callable[..., Engine], engine: Engine) -> None:
    """Row 0 alone, among others, and with rows waiting; without a seed, every sequence has one of its own."""
    sampled = params(16, temperature=0.9, top_k=50, top_p=0.95, seed=3)
    wide = [tokens(r) for r in engine.generate(PROMPTS, sampled)]
    assert tokens(engine.generate(PROMPTS[0], sampled)[0]) == wide[0]
    assert tokens(engine.generate(PROMPTS[0], replace(sampled, seed=8))[0]) != wide[0]
    with load(max_batch=2) as narrow:
        assert [tokens(r) for r in narrow.generate(PROMPTS, sampled)] == wide
    for seed, texts in ((3, 1), (None, 3)):
        assert len({r.token_ids for r in engine.generate([PROMPTS[0]] * 3, replace(sampled, seed=seed))}) == texts


# --- What ran


def test_the_default_policy_drafts_from_text(engine: Engine) -> None:
    """Breaks: bundles without a calibration, whose text takes a pass for every token although it was written before."""
    assert engine.policy.name == "exact"
    first, again = (engine.generate([9, 6, 7], params(30))[0] for _ in range(2))
    assert again.token_ids == first.token_ids
    assert again.stats.drafted.keys() <= {"ngram", "successor"} and again.stats.deep_passes < 20


def test_times_add_up(engine: Engine) -> None:
    stats = engine.generate(PROMPTS[0], params(10))[0].stats
    assert stats.time_to_first_token > 0 and stats.decode_time > 0
    assert stats.tokens_per_second == pytest.approx(9 / stats.decode_time)
    assert engine.generate(PROMPTS[0], params(1))[0].stats.tokens_per_second == 0


# --- The engine itself


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch": 0}, ParamsError),
        ({"prefill_chunk": 0}, ParamsError),
        ({"max_batch": 1.5}, ParamsError),
        ({"policy": "psychic"}, ParamsError),
        ({"target": "tpu"}, TargetError),
        ({"threads": -1}, ParamsError),
    ],
)
def test_bad_options_are_explained(bundle: Path, options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        Engine.load(bundle, EngineOptions(**{**options, "threads": ThreadOptions(options.get("threads", 1))}))


def test_advised_sampling_is_the_default(bundle_copy: Path, engine: Engine) -> None:
    """Breaks: a model whose authors advise min_p answers with unlikely tokens; or an older bundle does not load."""
    assert engine.default_params(max_new_tokens=3) == GenerationParams(max_new_tokens=3)
    advised = {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5}
    generation = manifest_of(bundle_copy)["generation"] | advised
    edit(bundle_copy, "generation", value=generation)
    with Engine.load(bundle_copy) as engine:
        assert engine.default_params(max_new_tokens=3) == GenerationParams(max_new_tokens=3, **advised)
        assert engine.default_params(temperature=0.5).temperature == 0.5
    edit(bundle_copy, "generation", value=generation | {"suppress_tokens": [4, 9]})
    with Engine.load(bundle_copy) as engine:  # a request's own biases leave those of the model
        assert engine.default_params(logit_bias={9: 2.0}).logit_bias == ((4, -100.0), (9, 2.0))
    edit(bundle_copy, "generation", "min_p", remove=True)
    with Engine.load(bundle_copy) as engine:
        assert engine.default_params().min_p == 0


def test_a_tokenizer_larger_than_the_model(bundle_copy: Path) -> None:
    """Fine-tuned models have added tokens without embedding: such a bundle must load, and name the token that it cannot take."""
    name = "tokenizer/tokenizer.json"
    state = json.loads((bundle_copy / name).read_text())
    first = len(state["model"]["vocab"])
    state["model"]["vocab"] |= {f"more{i}": first + i for i in range(50)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"].append({**plain, "id": first + 49, "content": "more49"})
    (bundle_copy / name).write_text(json.dumps(state))
    sign(bundle_copy, name)
    with Engine.load(bundle_copy, EngineOptions(threads=ThreadOptions(1))) as engine:
        assert len(engine.generate(PROMPTS[0], params(3))[0].token_ids) == 3
        with pytest.raises(PromptError, match="'more49', which the tokenizer has and the model has not"):
            engine.generate(f"{PROMPTS[0]}more49", params(3))
        engine.check_grammar(Grammar.regex("[a-z]+"))


def test_the_template_of_chats_with_tools(bundle_copy: Path) -> None:
    """A model with a template of its own for tools would never see them."""
    name = "tokenizer/tool_chat_template.jinja"
    (bundle_copy / name).write_text("TOOLS {{ tools | length }}")
    edit(bundle_copy, "tokenizer", "tool_chat_template", value=name)
    sign(bundle_copy, name)
    with Engine.load(bundle_copy, EngineOptions(threads=ThreadOptions(1))) as engine:
        assert engine.chat_text(CHAT, tools=[{}, {}]) == "TOOLS 2" and "TOOLS" not in engine.chat_text(CHAT)
        assert engine.tool_chat_template != engine.chat_template


def test_no_template_and_no_tokenizer_are_explained(bundle_copy: Path) -> None:
    """A bundle without tokenizer still generates from ids; text, chat and stop strings say what is missing."""
    edit(bundle_copy, "tokenizer", value=None)
    with Engine.load(bundle_copy, EngineOptions(threads=ThreadOptions(1))) as engine:
        [result] = engine.generate([5, 6], params(3))
        assert result.text is None and len(result.token_ids) == 3
        assert [chunk.text for chunk in engine.stream([5, 6], params(3))] == ["", "", ""]
        with pytest.raises(PromptError, match="no tokenizer"):
            engine.generate("text")
        with pytest.raises(PromptError, match="no chat template"):
            engine.chat_prompt(CHAT)
        with pytest.raises(ParamsError, match="tokenizer"):
            engine.generate([5], params(3, stop=("x",)))


# --- Other options on the same weights


class Launches:
    """Notes every launch."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, int]] = []

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        assert seconds > 0 and rows <= tokens
        self.graphs.append((graph, tokens))


def test_other_options_run_on_the_same_weights(load: Callable[..., Engine], engine: Engine) -> None:
    """Policies could be compared only by loading the weights for each; or an observer would change what it observes."""
    seen = Launches()
    with load(policy="full") as first:
        options = replace(first.options, policy="exact", max_batch=2)
        with first.with_options(options, seen) as second:
            assert (second.policy.name, second.max_batch, second.backend.launches) == ("exact", 2, first.backend.launches)
            assert tokens(second.generate(PROMPTS[0], params())[0]) == tokens(engine.generate(PROMPTS[0], params())[0])
            assert second.bits_limitation == engine.bits_limitation
        assert sum(graph == "uncut" for graph, _ in seen.graphs) == first.backend.launches["uncut"] > 0
        assert first.generate(PROMPTS[0], params(2)), "closing the second engine leaves the first one its weights"


def test_options_that_other_weights_would_need_are_refused(load: Callable[..., Engine]) -> None:
    """The engine would run with other threads than were asked for, and say nothing."""
    with load() as engine, pytest.raises(ParamsError, match=r"threads .* load another engine"):
        engine.with_options(EngineOptions(threads=ThreadOptions(2)))
