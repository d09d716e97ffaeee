"""Budgets and grammars behind thoughts: whatever a model writes, its thoughts end in time and its answer is valid."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tide_runtime import Engine, EngineOptions, GenerationParams, Grammar, ThreadOptions
from tide_runtime.errors import ParamsError
from tide_runtime.text.grammar import GrammarCompiler
from tide_runtime.text.thought_state import ThoughtState, ThoughtVocabulary
from tide_runtime.text.thoughts import ThoughtMarks, Thoughts, ThoughtSplitter
from tide_runtime.text.tokenizer import Tokenizer

TAGS = ThoughtMarks("<think>", "</think>", lead="\n", gap="\n\n")
CHANNELS = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>", gap="<|start|>assistant<|channel|>final<|message|>")
FORM = Grammar.json_schema(
    {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
)
EOS = 0


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with tokens that go over the end of a tag."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(['</ think >{" >{" >\n\n <think> </think>', '{"on": true} {"on": false}'] * 9, trainer)
    if request.param == "tags are tokens":
        backend.add_tokens(["<think>", "</think>"])
        backend.add_special_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>"])
    path = tmp_path_factory.mktemp("thoughts") / "tokenizer.json"
    backend.save(str(path))
    return path


def written(
    path: Path, thoughts: Thoughts, grammar: Grammar | None, seed: int, likes: float, most: int = 250
) -> tuple[str, ThoughtState]:
    """What a model writes that chooses at random, and the parts of a closing mark with probability ``likes``."""
    read, rng = Tokenizer.from_file(path), np.random.default_rng(seed)
    vocabulary = ThoughtVocabulary(read, read.vocab_size)
    compiled = GrammarCompiler(path, read.vocab_size, [EOS])
    state = vocabulary.start(thoughts, compiled.start(grammar) if grammar is not None else None, [EOS])
    closing, text = vocabulary.encode(f"{thoughts.marks.closing}{{"), ""
    for _ in range(most):
        mask = state.allowed([])
        ids = np.arange(1, read.vocab_size) if mask is None else np.flatnonzero(mask)
        token = int(rng.choice(ids))
        liked = [part for part in closing if part in ids and not text.endswith(vocabulary.text(part))]
        if liked and rng.random() < likes:
            token = liked[0]
        if token == EOS:
            break
        state.take(token)
        text += vocabulary.text(token)
        if state.complete:
            break
    return text.encode("latin-1").decode(errors="replace"), state


@pytest.mark.parametrize("marks", [TAGS, CHANNELS])
@pytest.mark.parametrize("begun", [True, False])
def test_the_answer_is_valid_and_the_thoughts_are_free(tokenizer: Path, marks: ThoughtMarks, begun: bool) -> None:
    """Breaks: JSON cannot be parsed because thoughts go into it, or there are none, as the grammar allows no thoughts."""
    seen = set()
    for seed in range(12):
        text, _ = written(tokenizer, Thoughts(marks, begun, budget=50), FORM, seed, likes=0.3 * (seed % 3))
        thoughts, answer, before = ThoughtSplitter(marks, begun).feed(text, last=True)
        assert json.loads(answer)["on"] in (True, False), text
        assert answer.startswith("{")
        seen.add((bool(thoughts), bool(before)))
    assert (True, True) in seen and (begun or marks is CHANNELS or (False, False) in seen)


@pytest.mark.parametrize("marks", [TAGS, CHANNELS])
def test_a_budget_closes_the_thoughts(tokenizer: Path, marks: ThoughtMarks) -> None:
    """Breaks: a request with a budget never comes to its answer."""
    for seed in range(4):
        text, state = written(tokenizer, Thoughts(marks, begun=True, budget=7), None, seed, likes=0.0, most=60)
        closed = len(ThoughtVocabulary(Tokenizer.from_file(tokenizer), 1).encode(marks.lead + marks.closing + marks.gap))
        assert 7 < state.thought_tokens <= 7 + closed
        assert f"{marks.lead}{marks.closing}{marks.gap}" in text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("grammar", [None, FORM])
def test_texts_with_a_budget_do_not_depend_on_drafts_or_company(
    exits_bundle: Path, temperature: float, grammar: Grammar | None
) -> None:
    """Breaks: a seed gives another text under policy exact, or beside other requests."""
    prompt, company = "class Point:", GenerationParams(max_new_tokens=30, temperature=temperature, seed=9)
    thoughts = Thoughts(TAGS, begun=True, budget=6)
    params = GenerationParams(max_new_tokens=60, temperature=temperature, seed=1, grammar=grammar, thoughts=thoughts)
    found = []
    for policy in ("full", "exact", "exit"):
        options = EngineOptions(policy=policy, threads=ThreadOptions(1), verify=False)  # type: ignore[arg-type]
        with Engine.load(exits_bundle, options) as engine:
            alone = engine.generate(prompt, params)[0]
            others = [engine.submit("def add(a, b):", company) for _ in range(2)]
            beside = engine.submit(prompt, params).result()
            assert (beside.token_ids, beside.text) == (alone.token_ids, alone.text)
            assert [other.result().finish_reason for other in others] == ["length"] * 2
            assert "\n</think>\n\n" in (alone.text or "") and alone.stats.thought_tokens > 6
            if grammar is not None:
                assert json.loads((alone.text or "").split("</think>\n\n")[1])["on"] in (True, False)
            if policy == "exact":
                assert alone.stats.drafted["grammar"] == alone.stats.accepted["grammar"] > 3
            found.append(alone.token_ids)
    assert found[0] == found[1]


def test_stop_strings_end_answers_and_not_thoughts(exits_bundle: Path) -> None:
    """Breaks: an answer is empty because its thoughts, or the lines before it, have what ends it."""
    with Engine.load(exits_bundle, EngineOptions(policy="full", threads=ThreadOptions(1), verify=False)) as engine:
        thoughts = Thoughts(TAGS, begun=True, budget=12)
        whole = engine.generate("class Point:", GenerationParams(max_new_tokens=40, thoughts=thoughts))[0].text or ""
        inside, _, answer = whole.partition("</think>\n\n")
        for stop, wanted in (("\n\n", None), (inside.strip()[:2], None), (answer.strip()[2:4], answer.strip()[:2])):
            params = GenerationParams(max_new_tokens=40, thoughts=thoughts, stop=(stop,))
            text = engine.generate("class Point:", params)[0].text or ""
            left = answer.lstrip().partition(stop)[0] if wanted is None else wanted
            assert ThoughtSplitter(TAGS, begun=True).feed(text, last=True).answer == left


def test_a_wrong_budget_is_refused() -> None:
    """Breaks: a budget of nothing, or a word, fails in the engine's thread."""
    for budget in (0, -1, True, "5"):
        with pytest.raises(ParamsError, match="budget >= 1"):
            GenerationParams(thoughts=Thoughts(TAGS, budget=budget))  # type: ignore[arg-type]
