"""Models with recurrent layers in the runtime: a text has the same tokens and log-probabilities, bit for bit, however it is run.

Every way of running is compared with policy ``full``, one text at a time, its prompt in one step, nothing cached. Bundles stay in
the folder ``$TIDE_TEST_RECURRENT``, if that is set: with them the tests run where torch does not, as under `benchmarks.cpu_mask`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import ADVANCE
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.errors import ParamsError
from tide_runtime.outputs import Generation

FAMILIES = [("lfm2", "source"), ("qwen3_5", "int4"), pytest.param(("mamba", "source"), marks=pytest.mark.slow)]
OPTIONS = EngineOptions(policy="full", max_batch=4, prefix_cache=False, threads=ThreadOptions(1))
ASKED = GenerationParams(max_new_tokens=24, logprobs=2, ignore_eos=True)
LENGTHS = (1, 2, 17, 33, 48, 5)


@dataclass(frozen=True)
class Model:
    """``alone``: by prompt, what each text is."""

    engine: Engine
    prompts: list[list[int]]
    alone: dict[tuple[int, ...], Generation]

    def engine_with(self, **changes: object) -> Engine:
        return self.engine.with_options(replace(OPTIONS, **changes))  # type: ignore[arg-type]

    def check(self, found: Sequence[Generation], prompts: Sequence[Sequence[int]]) -> None:
        for prompt, one in zip(prompts, found, strict=True):
            wanted = self.alone[tuple(prompt)]
            assert (one.token_ids, one.logprobs) == (wanted.token_ids, wanted.logprobs)


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name, weights = request.param
    folder = Path(os.environ.get("TIDE_TEST_RECURRENT") or tmp_path_factory.mktemp("recurrent"))
    directory = folder / f"{name}-{weights}"
    if not directory.is_dir():
        pytest.importorskip("torch")
        from export.recurrent_models import write_recurrent_bundle

        directory.mkdir(parents=True)
        write_recurrent_bundle(name, directory, weights=weights, verify=False)
    random = np.random.default_rng(0)
    with Engine.load(directory, replace(OPTIONS, max_batch=1)) as engine:
        size = engine.manifest.model.vocab_size
        prompts = [random.integers(3, size, length).tolist() for length in LENGTHS]
        yield Model(engine, prompts, {tuple(prompt): engine.generate(prompt, ASKED)[0] for prompt in prompts})


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_company_and_chunks_leave_the_bits(model: Model, chunk: int) -> None:
    """Breaks: a state that a launch's padding or a neighbour touches, or that a row without tokens loses."""
    with model.engine_with(prefill_chunk=chunk) as engine:
        model.check(engine.generate(model.prompts, ASKED), model.prompts)


class ForcedDrafts(ExactDepth):
    """Drafts of which some are right and the others are not, whatever they cost."""

    def __init__(self, engine: Engine, texts: dict[tuple[int, ...], Generation]) -> None:
        super().__init__(engine.manifest, DepthOptions(draft="none"), same_bits=False)
        self.random, self.texts, self.vocab = np.random.default_rng(0), texts, engine.manifest.model.vocab_size
        self.lookahead = 8
        self.speculator.propose = self._propose  # type: ignore[method-assign]

    def _propose(self, context: ExecutionContext, states: Sequence, prompts: Sequence[PromptChunk]) -> None:
        for state in states:
            state.begin_step()
            sequence = state.sequence
            text = self.texts[tuple(sequence.tokens[: sequence.prompt_tokens].tolist())].token_ids
            following = text[sequence.num_tokens - sequence.prompt_tokens :]
            right = self.random.integers(0, 4)
            wrong = self.random.integers(0, 4)
            for token in [*following[:right], *((token + 1) % self.vocab for token in following[right : right + wrong])]:
                if state.room > 0:
                    state.place(token, "ngram")


@pytest.mark.parametrize("rows", [1, 4])
def test_rejected_drafts_leave_the_bits(model: Model, rows: int) -> None:
    """Breaks: states that keep rejected tokens, or lose accepted ones."""
    options = replace(OPTIONS, max_batch=rows, prefill_chunk=11)
    engine = Engine(model.engine.bundle, options, backend=model.engine.backend, policy=ForcedDrafts(model.engine, model.alone))
    before = engine.backend.launches[ADVANCE]
    with engine:
        found = engine.generate(model.prompts, ASKED)
    model.check(found, model.prompts)
    drafted, accepted = (sum(sum(getattr(one.stats, kind).values()) for one in found) for kind in ("drafted", "accepted"))
    assert 0 < accepted < drafted
    assert engine.backend.launches[ADVANCE] > before


def test_drafts_that_are_all_accepted_cost_no_undo(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: steps that pay for an undo that they do not need."""
    policy = ForcedDrafts(model.engine, model.alone)
    monkeypatch.setattr(policy, "random", _Constant((3, 0)))
    before = model.engine.backend.launches[ADVANCE]
    with Engine(model.engine.bundle, OPTIONS, backend=model.engine.backend, policy=policy) as engine:
        model.check(engine.generate(model.prompts, ASKED), model.prompts)
    assert model.engine.backend.launches[ADVANCE] == before


class _Constant:
    def __init__(self, values: tuple[int, int]) -> None:
        self._values, self._calls = values, 0

    def integers(self, low: int, high: int) -> int:
        self._calls += 1
        return self._values[(self._calls - 1) % 2]


def test_drafts_beside_prompts_of_any_size(model: Model) -> None:
    """Breaks: the undo of a row whose launch held a prompt, and rows that join while others draft."""
    options = replace(OPTIONS, max_batch=3, prefill_chunk=5)
    engine = Engine(model.engine.bundle, options, backend=model.engine.backend, policy=ForcedDrafts(model.engine, model.alone))
    with engine:
        handles = [engine.submit(prompt, ASKED, streamed=False) for prompt in (*model.prompts, *model.prompts)]
        model.check([handle.result() for handle in handles], [*model.prompts, *model.prompts])


def test_preemption_leaves_the_bits(model: Model) -> None:
    """Breaks: states that are not built again when a request gives up its row, and a budget that forgets them."""
    memory = model.engine._memory
    long = [prompt for prompt in model.prompts if len(prompt) > 16]  # they begin with 9 blocks of tokens and end with 12
    blocks = 10 + len(long) * memory.row_blocks
    with model.engine_with(kv_memory=blocks * memory.block_bytes, max_batch=len(long)) as engine:
        model.check(engine.generate(long, ASKED), long)
        assert engine.stats().preemptions


def test_a_chat_computes_no_token_twice(model: Model) -> None:
    """Breaks: turns that compute their whole history again, and snapshots that are of another text or position."""
    random, eos = np.random.default_rng(1), model.engine.manifest.generation.eos_token_ids[0]
    asked = replace(ASKED, max_new_tokens=9)
    text: list[int] = []
    with model.engine_with(prefix_cache=True, policy="exact") as engine, model.engine_with() as plain:
        computed = 0
        for turn in range(4):
            text += [*random.integers(3, 60, 12).tolist(), eos, 5]
            (found,), (wanted,) = engine.generate(text, asked), plain.generate(text, asked)
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
            computed += found.stats.prompt_tokens - found.stats.prefix_tokens
            if turn > 1:
                assert found.stats.prompt_tokens - found.stats.prefix_tokens == 15  # its own, and the last of the reply before
            text += found.token_ids
        assert engine.stats().snapshots
        assert engine.stats().prefix_bytes


def test_a_changed_reply_goes_on_from_the_last_message(model: Model) -> None:
    """Breaks: chats whose template drops a part of each reply, which would begin from nothing."""
    random, eos = np.random.default_rng(2), model.engine.manifest.generation.eos_token_ids[0]
    system, question = (random.integers(3, 60, count).tolist() for count in (24, 20))
    first = [*system, eos, *question, eos, 7]
    with model.engine_with(prefix_cache=True) as engine, model.engine_with() as plain:
        engine.generate(first, ASKED)
        for second, known in (
            ([*first[:-1], 9, 9, 9, eos, 7], len(first) - 1),  # the reply is another
            ([*system, eos, 11, 12, eos, 7], len(system) + 1),  # the chat is another
        ):
            (found,), (wanted,) = engine.generate(second, ASKED), plain.generate(second, ASKED)
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert found.stats.prefix_tokens == known


def test_scores_are_those_of_a_decode(model: Model) -> None:
    """Breaks: scoring, whose prompts want many logits, as drafts do."""
    texts = [([*prompt, *model.alone[tuple(prompt)].token_ids], len(prompt)) for prompt in model.prompts]
    with model.engine_with(policy="exact", prefill_chunk=13) as engine:
        scores = engine.score_many(texts)
    for prompt, score in zip(model.prompts, scores, strict=True):
        assert score.argmax == list(model.alone[tuple(prompt)].token_ids)


def test_exit_is_refused(model: Model) -> None:
    """Breaks: exits that would leave states behind, and an error that gives no reason."""
    with pytest.raises(ParamsError, match="a token that skips a recurrent layer leaves its state behind"):
        model.engine_with(policy="exit")


def test_a_chat_goes_on_after_a_restart(model: Model, tmp_path: Path) -> None:
    """Breaks: states that are lost with the process or of another place of the text, and histories that are computed again."""
    random, eos = np.random.default_rng(3), model.engine.manifest.generation.eos_token_ids[0]
    asked = replace(ASKED, max_new_tokens=9)
    text: list[int] = []
    with model.engine_with() as plain:
        for turn in range(4):
            text += [*random.integers(3, 60, 12).tolist(), eos, 5]
            with model.engine_with(prefix_cache=True, prefix_dir=tmp_path) as engine:
                (found,), (wanted,) = engine.generate(text, asked), plain.generate(text, asked)
                assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
                if turn > 1:
                    assert found.stats.prompt_tokens - found.stats.prefix_tokens == 15  # as with the states in memory
                    (again,) = engine.generate([*text[:-1], 9], asked)
                    assert again.stats.prompt_tokens - again.stats.prefix_tokens == 1  # after the last message
            text += found.token_ids


@pytest.mark.parametrize("damage", [lambda own: own[:-9], lambda own: own[:-1] + bytes([own[-1] ^ 1]), lambda own: b""])
def test_a_damaged_state_is_a_miss(model: Model, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Breaks: a state that is half a file's, and files that stay broken."""
    prompt = [*model.prompts[4][:20], model.engine.manifest.generation.eos_token_ids[0], 5]
    with model.engine_with() as plain:
        (wanted,) = plain.generate(prompt, ASKED)
    for known in (0, 0, 21):  # nothing is there, it is damaged, it is written again
        with model.engine_with(prefix_cache=True, prefix_dir=tmp_path) as engine:
            (found,) = engine.generate(prompt, ASKED)
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert found.stats.prefix_tokens == known
        for path in tmp_path.rglob("*") if not engine.stats().prefix_disk.damaged else ():
            if path.is_file():
                path.write_bytes(damage(path.read_bytes()))
