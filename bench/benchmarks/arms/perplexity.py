"""Perplexity of a text in the arms of `benchmarks.quantised_decode`, each by its own kernels, token by token as in decoding.

Functions that arms' processes run (`tide_bench.arms.process.ArmProcess.apply`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tide_bench.arms.process import ArmError

MEASURED = ("tide", "genai-int4", "llamacpp")  # kinds of arms


def perplexity(arm: Any, kind: str, text: Sequence[int], options: dict[str, Any], vocab: int) -> float:
    """exp of the mean of -log p of each token of ``text`` from the third on, given those before it, as in a `Reading`.

    Args:
        kind: of `MEASURED`.
        options: of the arm's ``generate``.
        vocab: tokens of the model.
    """
    if kind == "tide":
        nats = arm.read(text, 1, options.get("policy", "full"), bits=options.get("bits", "same")).nats
    else:
        nats = (_genai(arm, text) if kind == "genai-int4" else _llamacpp(arm, text, vocab))[1:]
    if len(nats) != len(text) - 2:
        raise ArmError(f"gave {len(nats)} of {len(text) - 2} log-probabilities")
    return math.exp(float(np.mean(nats)))


def _genai(arm: Any, text: Sequence[int]) -> list[float]:
    params = arm._og.GeneratorParams(arm._model)
    params.set_search_options(batch_size=1, max_length=len(text) + 1, do_sample=False)
    generator = arm._og.Generator(arm._model, params)
    nats = list[float]()
    for token, following in pairwise(text):
        generator.append_tokens(np.array([[token]], np.int32))
        logits = np.asarray(generator.get_logits(), np.float64).reshape(-1)
        nats.append(float(np.logaddexp.reduce(logits) - logits[following]))
    return nats


def _llamacpp(arm: Any, text: Sequence[int], vocab: int) -> list[float]:
    """Its server gives the probabilities of the tokens that it might write next."""
    arm._load(1, len(text) + 1)
    nats = list[float]()
    for at in range(1, len(text)):
        body = {"prompt": list(text[:at]), "n_predict": 1, "n_probs": vocab, "cache_prompt": True, "temperature": -1}
        (answer,) = arm._call("/completion", body)["completion_probabilities"]
        nats.append(next(-top["logprob"] for top in answer["top_logprobs"] if top["id"] == text[at]))
    return nats
