"""Models with two sets of rotary factors (Phi-3's longrope): each text takes those of its length, whatever runs beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_in_fp32 import cuda_in_fp32
from export.architectures import VOCAB
from export.passes.test_padded_attention import logits
from export.sources.gguf.tiny_gguf import GgufFile, tiny
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.errors import TargetError, UnsupportedModelError, VerificationError
from tide_runtime.outputs import Generation
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import load_model
from tide_export.model.long_rotary import BothFactors, long_rotary_from
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.checks import check_loaded

ORIGINAL = 24  # tokens that a short text has at most
SLOTS = 64
NEW = 14
SHORT, LONG = np.linspace(1, 1.3, 8).tolist(), np.linspace(1.5, 8, 8).tolist()
CONFIG = ExportConfig(checkpoints="1", max_seq_len=SLOTS)


def phi3(**settings: Any) -> PreTrainedModel:
    """A random Phi-3 whose layers are scaled up, so that positions matter."""
    torch.manual_seed(0)
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG}
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * SLOTS,
        original_max_position_embeddings=ORIGINAL,
        pad_token_id=0,
        rope_parameters=rotary,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(8.0)
    return model


@dataclass(frozen=True)
class Case:
    """``checks``: of the verification, in words."""

    model: PreTrainedModel
    directory: Path
    checks: list[str]

    def engine(self, policy: str = "full", **options: Any) -> Engine:
        return Engine.load(self.directory, EngineOptions(policy=policy, **options))

    def generated(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Greedy tokens of `generate`."""
        given = torch.tensor([prompt])
        with torch.no_grad():
            found = self.model.generate(given, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        return tuple(found[0, len(prompt) :].tolist())

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities of all tokens after the first, in one pass over the text."""
        with torch.no_grad():
            found = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
        return found[np.arange(len(ids) - 1), ids[1:]]


def written(loaded: LoadedModel, directory: Path, config: ExportConfig = CONFIG) -> Case:
    _, checks = write_bundle(loaded, directory, config, ExportProgress(quiet=True))
    return Case(loaded.model, directory, [str(check) for check in checks])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Loaded from files, to which angles are held."""
    directory = tmp_path_factory.mktemp("model")
    phi3().save_pretrained(directory)
    loaded = load_model(str(directory), "fp32", tokenizer="none")
    check_loaded(loaded, own_tokenizer=False)
    return loaded


@pytest.fixture(scope="module")
def case(saved: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return written(saved, tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def engine(case: Case) -> Iterator[Engine]:
    with case.engine() as loaded:
        yield loaded


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def repeated(count: int) -> list[int]:
    """A text whose continuation can be copied from it."""
    return (ids(4, seed=1) * count)[:count]


# Short to the end, across the crossing, long after one token, long from the start; some with drafts.
PROMPTS = [ids(5), ids(16), ids(ORIGINAL - 1), ids(ORIGINAL), ids(ORIGINAL + 1), ids(40), repeated(19), repeated(30)]
CROSSINGS = [0, 1, 1, 1, 0, 0, 1, 0]
PARAMS = GenerationParams(max_new_tokens=NEW, ignore_eos=True)


def tokens(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in generations]


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_texts_are_those_of_generate(case: Case, policy: str) -> None:
    """Keys of short factors would be attended to by queries of long ones, a long text turn its neighbours, or a draft be verified
    with the factors of the other side of the crossing."""
    wanted = [case.generated(prompt) for prompt in PROMPTS]
    with case.engine(policy, prefix_cache=False) as engine:
        alone = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        together = engine.generate(PROMPTS, PARAMS)
        stats = engine.stats()
    assert tokens(alone) == tokens(together) == wanted
    assert [one.stats.rotary_restarts for one in alone] == CROSSINGS and stats.rotary_restarts == 2 * sum(CROSSINGS)
    if policy == "exact":
        assert sum(sum(one.stats.accepted.values()) for one in alone[6:]) > 0


def test_chunks_and_preemption(case: Case) -> None:
    """A text that is computed again in pieces, or twice, would get keys of both sets."""
    wanted = [case.generated(prompt) for prompt in PROMPTS]
    with case.engine(kv_memory=engine_bytes(case, SLOTS + 16), prefill_chunk=3, prefix_cache=False) as engine:
        found = engine.generate(PROMPTS, PARAMS)
    assert tokens(found) == wanted and sum(one.stats.preemptions for one in found) > 0


def engine_bytes(case: Case, slots: int) -> int:
    """KV memory of ``slots`` tokens."""
    heads, width, layers = 2, 16, 2
    return slots * layers * heads * 2 * width * 4


def test_prefixes_of_the_two_sets_are_kept_apart(case: Case) -> None:
    """A long text would continue the keys of a short one, whose first tokens it has."""
    short, long, few = PROMPTS[5][:20], PROMPTS[5], replace(PARAMS, max_new_tokens=3)
    with case.engine() as engine:
        for prompt, params, known in (
            (short, few, 0),
            (long, few, 0),
            (short, PARAMS, 16),  # computed again from the long text's block on
            (long, few, 32),
            ([*short, *case.generated(short)], PARAMS, 33),  # up to the end of the text before the last
        ):
            (found,) = engine.generate([prompt], params)
            assert found.token_ids == case.generated(prompt)[: params.max_new_tokens] and found.stats.prefix_tokens == known


@pytest.mark.parametrize("count", [ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize("decode", [False, True])
def test_a_text_is_scored_by_its_whole_length(case: Case, engine: Engine, count: int, decode: bool) -> None:
    """Its first tokens would be scored with other factors than one pass of the model over the text has."""
    (score,) = engine.score_many([(ids(count, seed=3), 1)], decode)
    np.testing.assert_allclose(score.logprobs, case.logprobs(ids(count, seed=3)), atol=1e-4)


PLANS: list[tuple[list[int], list[list[int]]]] = [  # whether each text is long, and tokens by step
    ([1], [[30]]),
    ([1, 0], [[30, 30]]),
    ([0, 1, 1], [[20, 1, 3], [1, 9, 25], [9, 20, 2]]),
    ([1, 0, 1], [[1, 0, 17], [0, 20, 1], [20, 0, 1], [9, 10, 11]]),
]


@pytest.mark.parametrize(("long", "plan"), PLANS)
def test_a_token_has_the_same_bits_in_every_step(engine: Engine, long: list[int], plan: list[list[int]]) -> None:
    """A text would depend on the lengths of those that run beside it."""
    offsets = [ORIGINAL * one for one in long]
    for number, rows in enumerate(logits(engine, plan, offsets=offsets)):
        alone = logits(engine, [[1]] * 30, number, offsets=offsets[number : number + 1])[0]
        assert rows == alone[: len(rows)] and len(set(alone)) == 30


def test_both_sets_are_verified(case: Case) -> None:
    """Wrong angles of long texts would show in no check, as the prompts of the verification are short."""
    named = [check for check in case.checks if "Δlogit" in check]
    assert len(named) == 6 and sum("(in a long text)" in check for check in named) == 3


@pytest.mark.parametrize("length", slow_but(["short", "long"], "long"))
def test_a_wrong_set_of_factors_is_refused(
    saved: LoadedModel, tmp_path: Path, length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle would be another model for texts of one length."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))  # a trace of the honest one is no trace of this
    honest = BothFactors.__init__

    def faulty(self: BothFactors, *given: Any) -> None:
        honest(self, *given)
        right = getattr(self, length).inv_freq
        wrong = right * 1.01
        for part in (self.short, self.long):
            part._buffers = {name: wrong if tensor is right else tensor for name, tensor in part._buffers.items()}

    assert long_rotary_from(saved.model) == ORIGINAL
    monkeypatch.setattr(BothFactors, "__init__", faulty)
    with pytest.raises(UnsupportedModelError, match="Phi3RotaryEmbedding"):
        long_rotary_from(saved.model)
    monkeypatch.setattr("tide_export.model.long_rotary._is_known", lambda *_: True)
    for loaded, message in (
        (saved, "rotary embedding: .* has other angles"),
        (replace(saved, weight_files=()), "in a long text" if length == "long" else "ids"),
    ):
        directory = tmp_path / str(bool(loaded.weight_files))
        directory.mkdir()
        with pytest.raises(VerificationError, match=message):
            written(loaded, directory)


@pytest.mark.slow
def test_other_targets(saved: LoadedModel, tmp_path: Path) -> None:
    """A loop on a device would advance positions with slots; texts that stay short have one set of factors everywhere."""
    for name, targets, length in (("both", ("cpu", "cuda"), SLOTS), ("short", ("cpu", "cuda"), ORIGINAL)):
        progress, directory = ExportProgress(quiet=True), tmp_path / name
        directory.mkdir()
        config = replace(CONFIG, targets=targets, max_seq_len=length, verify=length == ORIGINAL)
        with cuda_in_fp32():
            manifest, _ = write_bundle(saved, directory, config, progress)
        is_long = length > ORIGINAL
        assert manifest.long_rotary_from == (ORIGINAL if is_long else None)
        assert list(manifest.targets) == (["cpu"] if is_long else ["cpu", "cuda"]) and ("cuda" in progress.failures) == is_long
    with cuda_in_fp32(), pytest.raises(TargetError, match=f"--max-seq-len {ORIGINAL}"):
        written(saved, tmp_path, replace(CONFIG, targets=("cuda",)))


def phi3_file(**keys: Any) -> GgufFile:
    """As llama.cpp's converter writes it; the first half of each head is rotated."""
    own = {
        "rope.scaling.original_context_length": ORIGINAL,
        "rope.scaling.attn_factor": 1.25,
        "rope.dimension_count": 16,
    }
    factors = {"short_factor": SHORT, "long_factor": LONG}
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_factor": 1.25, **factors}
    config = {"rope_parameters": rotary, "original_max_position_embeddings": ORIGINAL, "pad_token_id": 0}
    content = tiny("phi3", {**config, "num_attention_heads": 2, "num_key_value_heads": 1}, **{**own, **keys})
    for name, values in factors.items():
        content.tensors[f"rope_factors_{name.removesuffix('_factor')}.weight"] = np.array(values, np.float32)
    return content


def test_a_gguf_file_is_the_model_that_it_was_written_from(tmp_path: Path) -> None:
    """A factor in another's place, or the attention factor left out, would give another model."""
    content = phi3_file()
    loaded = load_model(str(content.write(tmp_path / "phi3.gguf")), "fp32")
    check_loaded(loaded, own_tokenizer=True)
    with torch.no_grad():
        for count in (ORIGINAL, ORIGINAL + 20):
            given = torch.tensor([ids(count)])
            torch.testing.assert_close(loaded.model(given).logits, content.model(given).logits, rtol=0, atol=1e-4)
    (tmp_path / "bundle").mkdir()
    assert any("(in a long text)" in check for check in written(loaded, tmp_path / "bundle").checks)
    for key in ("long_factor", "short_factor", "attention_factor"):
        wrong = load_model(str(tmp_path / "phi3.gguf"), "fp32")
        parameters, rotary = wrong.model.config.rope_parameters, wrong.model.model.rotary_emb
        parameters[key] = [1.01 * one for one in parameters[key]] if key != "attention_factor" else 1.01 * parameters[key]
        wrong.model.model.rotary_emb = type(rotary)(rotary.config)
        with pytest.raises(VerificationError, match="rotary embedding"):
            check_loaded(wrong, own_tokenizer=True)


REFUSED = {
    "one set": ({}, ("rope_factors_short.weight", None), r"tensor rope_factors_long\.weight without"),
    "another width": (
        {},
        ("rope_factors_long.weight", np.ones(4, np.float32)),
        r"rope_factors_long\.weight has 4 factors.*expected 8",
    ),
    "scaled positions": ({"rope.scaling.factor": 4.0}, None, r"rope\.scaling\.factor = 4\.0.*besides"),
    "yarn": ({"rope.scaling.type": "yarn"}, None, r"rope\.scaling\.type = yarn"),
    "mixed": ({"rope.scaling.yarn_ext_factor": 0.5}, None, r"yarn_ext_factor = 0\.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_say_more_are_refused(tmp_path: Path, name: str) -> None:
    """The bundle would be another model, and be verified against itself."""
    keys, change, message = REFUSED[name]
    content = phi3_file(**keys)
    if change is not None:
        tensor, values = change
        content.tensors.pop(tensor)
        content.tensors |= {tensor: values} if values is not None else {}
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(content.write(tmp_path / "phi3.gguf")), "fp32")
