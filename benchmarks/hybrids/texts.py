"""Whether a recurrent model's text is HuggingFace's, and the same in every way of making it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tide_bench.build_cache import run_in_process
from tide_bench.output_checks import first_difference
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.hybrids.families import prompts, write_family
from benchmarks.same_text.ways import REFERENCE, Ask, Text, Way, outcomes

NEAR_TIE = 1e-4  # logits closer than this may change places with the order of a sum
CROWD = 6
CHUNKS = 12  # prompts in chunks of 1, 2, … tokens
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
    """

    unlike: int | None
    texts: int
    differ: dict[str, int] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)


def run_family(name: str, form: str, count: int, new_tokens: int) -> FamilyRun:
    """``form``: of the weights, as ``tide-export --weights`` takes it."""
    with tempfile.TemporaryDirectory() as folder:
        weights, bundle = Path(folder) / "weights", Path(folder) / "bundle"
        run_in_process(write_family, name, weights)
        run_in_process(_export, weights, bundle, form)
        asked = prompts(count)
        params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=1)
        asks = [Ask(prompt, params) for prompt in asked]
        options = EngineOptions(target="cpu", threads=ThreadOptions(shared=True), verify=False, depth=DepthOptions(draft="ngram"))
        with Engine.load(bundle, options) as engine:
            reference: list[Text] = []
            run = FamilyRun(None, count)
            for way, texts, figures in _every_way(engine, asks):
                reference = reference or texts
                run.differ[way] = sum(own != other for own, other in zip(texts, reference, strict=True))
                for figure, value in figures.items():
                    run.figures[figure] = run.figures.get(figure, 0) + value
        if form == "fp32":
            run.unlike = run_in_process(unlike_huggingface, weights, asked, [text.tokens for text in reference])
    return run


def _every_way(engine: Engine, asks: Sequence[Ask]) -> Iterator[tuple[str, list[Text], dict[str, int]]]:
    for outcome in outcomes(engine, asks, WAYS):
        yield outcome.way.name, outcome.texts, dict(outcome.figures)
    for size in range(1, CHUNKS + 1):
        options = replace(engine.options, policy="full", max_batch=CROWD, prefill_chunk=size, prefix_cache=False)
        with engine.with_options(options) as chunked:
            done = chunked.generate([ask.prompt for ask in asks], asks[0].params)
            yield f"full, prompts in chunks of {size}", [Text.of(one) for one in done], {}


def _export(weights: Path, bundle: Path, form: str) -> None:
    from tide_export import export
    from tide_export.config import ExportConfig

    export(str(weights), bundle, ExportConfig(weights=form, checkpoints="none", targets=("cpu",), verify=False, tokenizer="none"))


def unlike_huggingface(folder: Path, asked: Sequence[list[int]], texts: Sequence[Sequence[int]]) -> int:
    """How many of ``texts`` are not HuggingFace's greedy continuations and part from them without a near tie."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    differing = 0
    with torch.inference_mode():
        for prompt, own in zip(asked, texts, strict=True):
            ids = torch.tensor([prompt])
            plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(own), **plain)
            theirs = output[0, len(prompt) :].tolist()
            place = first_difference(own, theirs)
            if place is not None:
                logits = model(torch.tensor([[*prompt, *theirs[:place]]])).logits[0, -1]
                differing += float((logits[own[place]] - logits[theirs[place]]).abs()) >= NEAR_TIE
    return differing
