"""Whether a recurrent model's text is HuggingFace's, and the same in every way of making it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tide_bench.output_checks import first_difference
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.hybrids.families import family_model, prompts
from benchmarks.same_text.ways import REFERENCE, Ask, Text, Way, outcomes

NEAR_TIE = 1e-4  # logits closer than this may change places with the order of a sum
CROWD = 6
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 11, 16)  # tokens of a prompt that a step takes
WAYS = (
    REFERENCE,
    Way("full", CROWD),
    Way("full", CROWD, cached=True),
    Way("full", 1, cached=True),
    Way("full", CROWD, scarce=True),
    Way("exact", 1),
    Way("exact", CROWD),
    Way("exact", CROWD, cached=True),
    Way("exact", CROWD, scarce=True),
)


@dataclass
class FamilyRun:
    """What came of one family in one form of its weights.

    Args:
        unlike: texts that part from HuggingFace's without a near tie; None where the weights were rounded.
        differ: by way, the texts that are not those of a single caller under `full`.
        figures: drafted, accepted, prefix_tokens, preemptions of all ways.
        failure: why it could not run.
    """

    name: str
    form: str
    texts: int = 0
    unlike: int | None = None
    differ: dict[str, int] = field(default_factory=dict)
    figures: Counter[str] = field(default_factory=Counter)
    failure: str = ""


class Greedy(NamedTuple):
    """HuggingFace's continuation; of each place the second likeliest token, and how much less its logit is."""

    tokens: list[int]
    seconds: list[int]
    gaps: list[float]

    def parts(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` part from it without a near tie."""
        place = first_difference(tokens, self.tokens)
        return place is not None and not (tokens[place] == self.seconds[place] and self.gaps[place] < NEAR_TIE)


def run_family(name: str, forms: Sequence[str], count: int, new_tokens: int) -> list[FamilyRun]:
    """A run for each of ``forms`` of the weights, as ``tide-export --weights`` takes them. It needs one core."""
    import torch

    torch.set_num_threads(1)
    asked = prompts(count)
    asks = [Ask(prompt, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=1)) for prompt in asked]
    runs = [FamilyRun(name, form) for form in forms]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        family_model(name).save_pretrained(weights)
        for run in runs:
            try:
                texts = _run_form(run, weights, Path(folder) / run.form, asks)
            except Exception as error:  # another family can still be run
                run.failure = f"{type(error).__name__}: {error}"
                continue
            run.texts = count
            if run.form == "fp32":
                theirs = huggingface_texts(weights, asked, new_tokens)
                run.unlike = sum(one.parts(text.tokens) for one, text in zip(theirs, texts, strict=True))
    return runs


def _run_form(run: FamilyRun, weights: Path, bundle: Path, asks: Sequence[Ask]) -> list[Text]:
    """The texts of a single caller under `full`; ``run`` gets what the others are."""
    from tide_export import export
    from tide_export.config import ExportConfig

    config = ExportConfig(weights=run.form, checkpoints="none", targets=("cpu",), verify=False, tokenizer="none")
    export(str(weights), bundle, config)
    options = EngineOptions(target="cpu", threads=ThreadOptions(1), verify=False, depth=DepthOptions(draft="ngram"))
    reference: list[Text] = []
    with Engine.load(bundle, options) as engine:
        for way, texts, figures in _every_way(engine, asks):
            reference = reference or texts
            run.differ[way] = sum(own != other for own, other in zip(texts, reference, strict=True))
            run.figures += figures
    return reference


def _every_way(engine: Engine, asks: Sequence[Ask]) -> Iterator[tuple[str, list[Text], Counter[str]]]:
    for outcome in outcomes(engine, asks, WAYS):
        yield outcome.way.name, outcome.texts, outcome.figures
    for size in CHUNKS:
        options = replace(engine.options, policy="full", max_batch=CROWD, prefill_chunk=size, prefix_cache=False)
        with engine.with_options(options) as chunked:
            done = chunked.generate([ask.prompt for ask in asks], asks[0].params)
            yield f"full, prompts in chunks of {size}", [Text.of(one) for one in done], Counter()


def huggingface_texts(folder: Path, asked: Sequence[list[int]], new_tokens: int) -> list[Greedy]:
    """Greedy continuations, each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    found = []
    with torch.inference_mode():
        for prompt in asked:
            ids = torch.tensor([prompt])
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **plain)
            values, places = torch.stack([logits[0] for logits in made.logits]).topk(2)
            gaps = (values[:, 0] - values[:, 1]).tolist()
            found.append(Greedy(made.sequences[0, len(prompt) :].tolist(), places[:, 1].tolist(), gaps))
    return found
