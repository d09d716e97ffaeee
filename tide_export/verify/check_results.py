"""How a bundle may differ from the eager model, and how it does: the results of its verification, which are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.errors import VerificationError

# Allowed rounding error relative to the values: eager and compiled kernels sum in different orders.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
# The same where int8 rounds: a number that differs in its last bit may round the other way, and every later one follows.
# SmolLM2-135M differs by up to 1.2e-2 with int8 KV caches.
INT8_TOLERANCE = 5e-2
# Nats per token. Rounding to int8 costs some thousandths; at 1 the perplexity of the model's own text is 2.7 times the model's.
MAX_DIVERGENCE = 1.0
MIN_COSINE = 0.98  # similarity of an embedding model's final states where activations are rounded to int8


@dataclass(frozen=True)
class GraphCheck:
    """How a segment's output differs from the eager model's, where both start from the eager model's state at the cut; or that of
    all segments as one graph.

    Args:
        prompt: the one with the largest difference.
        difference: root mean square of the difference over that of the values, of the token or channel where it is largest.
        max_difference: max |Δ| of the output.
    """

    graph: str
    layers: tuple[int, int]
    prompt: str
    difference: float
    tolerance: float
    max_difference: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        found = f"{self.graph} (layers {self.layers[0]} to {self.layers[1] - 1}): relative difference {self.difference:.1e}"
        return found if self.passed else f"{found} (allowed {self.tolerance:.1e}), most in {self.prompt[:48]!r}"


@dataclass(frozen=True)
class StepCheck:
    """How a segment's output for tokens that run one by one differs from that of its pass over the prompts, see `GraphCheck`."""

    segment: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        found = f"{self.segment}, token by token: relative difference {self.difference:.1e} from its pass over the prompt"
        return found if self.passed else f"{found} (allowed {self.tolerance:.1e})"


@dataclass(frozen=True)
class PromptCheck:
    """How the logits of a bundle as it runs differ from the eager model's over a prompt.

    Args:
        max_difference: max |Δlogit|.
        tolerance: allowed for it; None where activations or caches are rounded to int8, and ``divergence`` is limited instead.
        divergence: KL divergence from the eager model in nats, mean over the tokens.
        agreement: share of the prompt's tokens after which the likeliest token is the same.
    """

    prompt: str
    tokens: int
    max_difference: float
    tolerance: float | None
    divergence: float
    agreement: float

    @property
    def passed(self) -> bool:
        if self.tolerance is None:
            return self.divergence <= MAX_DIVERGENCE  # False for NaN
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        found = f"{self.prompt[:48]!r}: max |Δlogit| {self.max_difference:.1e}"
        if self.tolerance is None:
            found += f", KL divergence {self.divergence:.1e} nats"
        if not self.passed:
            found += f" (allowed {self.tolerance or MAX_DIVERGENCE:.1e})"
        model = "the eager model" if self.tolerance is not None else "the same weights without activations in int8"
        return f"{found}, the argmax of {model} for {self.agreement:.0%} of the prompt's tokens"


@dataclass(frozen=True)
class TextCheck:
    """The model's loss on `TEXT`, a plain English one, in nats per token, and that of a model that has learnt nothing.

    It tells a tokenizer or a head of another model from the right one, and never refuses a bundle: an untrained model looks the
    same, and what has a file to be held against is (`tide_export.verify.checks`).
    """

    loss: float
    uniform: float

    passed = True

    def __str__(self) -> str:
        found = f"loss on a plain English text: {self.loss:.2f} nats per token"
        if self.loss <= self.uniform / 2:
            return found
        return (
            f"{found}, and guessing all tokens alike has {self.uniform:.2f}: the model is untrained, knows no English, or has "
            "the tokenizer of another model"
        )


@dataclass(frozen=True)
class StateCheck:
    """How near the final states of an embedding model's bundle as it runs are to the eager model's over a prompt.

    ``cosine``: similarity of the token for which it is least.
    """

    prompt: str
    cosine: float

    @property
    def passed(self) -> bool:
        return self.cosine >= MIN_COSINE  # False for NaN

    def __str__(self) -> str:
        found = f"{self.prompt[:48]!r}: cosine similarity of the final states at least {self.cosine:.6f}"
        return found if self.passed else f"{found} (expected {MIN_COSINE})"


Check = GraphCheck | StepCheck | PromptCheck | TextCheck | StateCheck


def refuse_failed(checks: Sequence[Check]) -> None:
    """Raise VerificationError that names the checks which have not passed, if there are any."""
    failed = [str(check) for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            f"the bundle differs from the eager model: {'; '.join(failed)}. Nothing was written. Please report the model's "
            "config; --no-verify writes the bundle all the same"
        )
