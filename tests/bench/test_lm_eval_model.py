"""TIDE in lm-evaluation-harness, held against the harness's own HuggingFace model on the same weights."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.conftest import MAX_SEQ_LEN
from tide_runtime import ThreadOptions
from tide_runtime.errors import BundleError, ParamsError, PromptError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'tide-llm[eval]'")

from lm_eval.api.instance import Instance, OutputType
from lm_eval.models.huggingface import HFLM
from tide_bench import lm_eval_model
from tide_bench.lm_eval_model import TideLM, generation_params

PAIRS = [
    ("def add(a, b):\n", "    return a + b\n"),
    ("", "class Point:"),
    ("self.x = ", "x"),
    ("ends with spaces  ", "y"),
    ("x = 1\n" * 60, "self.x = x"),  # longer than the cache
]
TEXTS = ["def add(a, b):\n    return a + b\n", "x = [1, 2]\n" * 30, ""]  # the second one in several windows
PROMPTS = ["def add", "class Point:\n    def __init__(self", "x = 1\n" * 60]
GREEDY = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}


@pytest.fixture(scope="module")
def tide(bundle: Path) -> Iterator[Callable[..., TideLM]]:
    """Models of the tiny bundle. One thread each: the process has sessions of other tests, so there is no pool for all."""
    models: list[TideLM] = []

    def load(folder: Path = bundle, **options: Any) -> TideLM:
        models.append(TideLM(bundle=str(folder), **options))
        return models[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_model, "ThreadOptions", lambda *_, **__: ThreadOptions(1))
        yield load
    for model in models:
        model.engine.close()


@pytest.fixture(scope="module")
def hf(hf_model_directory: Path) -> HFLM:
    return HFLM(pretrained=str(hf_model_directory), device="cpu", dtype="float32", max_length=MAX_SEQ_LEN)


def asked(kind: OutputType, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_log_likelihoods_are_the_huggingface_models(tide: Callable[..., TideLM], hf: HFLM, policy: str) -> None:
    """A score would be of other tokens: off by one place, without the context, or with the wrong end of a long one."""
    pairs, texts = asked("loglikelihood", *PAIRS), asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    model = tide(policy=policy, batch_size=3)
    own, other = (one.loglikelihood(pairs, disable_tqdm=True) for one in (model, hf))
    assert [value for value, _ in own] == pytest.approx([value for value, _ in other], abs=1e-3)
    assert [greedy for _, greedy in own] == [greedy for _, greedy in other]
    own, other = (one.loglikelihood_rolling(texts, disable_tqdm=True) for one in (model, hf))
    assert own == pytest.approx(other, abs=1e-2)


def test_a_continuation_is_greedy_when_the_policy_would_write_it(tide: Callable[..., TideLM]) -> None:
    """Tasks such as lambada count these flags, and the random model's own tokens are no text that could be asked for."""
    model = tide(policy="full")
    prompt = [5, 9, 3]
    written = list(model.engine.generate(prompt, generation_params({**GREEDY, "until": []}, 4))[0].token_ids)[:4]
    other = [*written[:-1], (written[-1] + 1) % 250]
    found = model._loglikelihood_tokens([(("", ""), prompt, one) for one in (written, other, [])], disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False, True] and found[2][0] == 0


def test_texts_are_the_huggingface_models(tide: Callable[..., TideLM], hf: HFLM) -> None:
    """A text would go on behind its stop string, or begin behind another part of a long context."""
    requests = asked("generate_until", *((prompt, GREEDY) for prompt in PROMPTS))
    assert tide(policy="full").generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)


def test_generation_kwargs_become_parameters() -> None:
    """A task's sampling would be ignored, or greedy tasks sampled."""
    assert generation_params({"until": "###", "max_tokens": 5, "do_sample": False, "temperature": 0.7}, 256).greedy
    greedy = generation_params({"until": ["", "\n"], "num_beams": 1}, 7)
    assert (greedy.max_new_tokens, greedy.temperature, greedy.stop) == (7, 0.0, ("\n",))
    sampled = generation_params({"do_sample": True, "top_p": 0.9, "seed": 3}, 7)
    assert (sampled.temperature, sampled.top_p, sampled.seed) == (1.0, 0.9, 3)
    assert generation_params({"temperature": 0.5}, 7).temperature == 0.5
    for other in ({"num_beams": 4}, {"penalty_alpha": 0.6}):
        with pytest.raises(ParamsError, match=f"generation_kwargs has {next(iter(other))}"):
            generation_params(other, 7)


def test_errors_say_what_to_do(tide: Callable[..., TideLM], bundle: Path, tmp_path: Path) -> None:
    """A user would meet a traceback from somewhere inside."""
    with pytest.raises(ParamsError, match="--model_args bundle=FOLDER"):
        TideLM()
    with pytest.raises(BundleError, match="give the folder that tide-export wrote"):
        tide(tmp_path / "nowhere")
    with pytest.raises(ParamsError, match="batch_size is 'many'; set it to a number"):
        tide(batch_size="many")
    mute = Path(shutil.copytree(bundle, tmp_path / "mute"))
    manifest = json.loads((mute / "manifest.json").read_text())
    (mute / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": None}))
    with pytest.raises(BundleError, match=r"has no tokenizer.*export it again from a model folder with a tokenizer\.json"):
        tide(mute)
    model = tide()
    with pytest.raises(PromptError, match=r"export with --max-seq-len \d+"):
        model.loglikelihood(asked("loglikelihood", ("a", "x = 1\n" * 60)), disable_tqdm=True)
    with pytest.raises(ParamsError, match="max_gen_toks is 64, which leaves no room"):
        model.generate_until(asked("generate_until", ("a", {"until": [], "max_gen_toks": MAX_SEQ_LEN})), disable_tqdm=True)
