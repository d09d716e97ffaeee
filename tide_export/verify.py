"""Compare a finished bundle with the eager model: logits and greedy tokens of real prompts.

Products with low-bit weights round their activations to int8, which changes a logit far more than another order of sums does and
would hide a wrong weight. So a copy of the bundle that computes these products in fp32 is held to the tolerance, and the bundle
itself to a bound on the KL divergence. A bundle with int8 KV caches is held to a tolerance against the eager model with a cache
rounded in the same way, and to the bound against the eager model as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from tide_runtime.errors import ModelFilesError, VerificationError

from tide_export.kv_scales import KVScales, rounded_cache
from tide_export.load import LoadedModel

PROMPTS = (
    "def binary_search(items, target):\n    ",
    "The quick brown fox jumps over the lazy dog. In the beginning",
    'import json\n\n\nclass Config:\n    """Settings read from a file."""\n\n    def __init__(self, path):\n',
    "Q: What is the capital of France?\nA:",
)
GREEDY_TOKENS = 16
# Allowed rounding error of a logit relative to the largest one: eager and compiled kernels sum in different orders.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
# The same with int8 KV caches: a number that differs in its last bit may round the other way, and every later one follows.
# SmolLM2-135M differs by up to 1.2e-2.
INT8_KV_TOLERANCE = 5e-2
# Nats per token. Rounding to int8 costs some thousandths; at 1 the perplexity of the model's own text is 2.7 times the model's.
MAX_DIVERGENCE = 1.0
FP32_ACTIVATIONS = 1  # MatMulNBits' accuracy_level


@dataclass(frozen=True)
class PromptCheck:
    """How a bundle's logits differ from the eager model's over a prompt.

    Args:
        max_difference: max |Δlogit|.
        tolerance: allowed for it; None where activations or caches are rounded to int8, and ``divergence`` is limited instead.
        divergence: KL divergence from the eager model in nats, mean over the tokens.
        greedy_agreement: share of equal greedy tokens after the prompt; None where none were generated.
        tie: the eager model's logit gap where the greedy tokens first differ.
    """

    prompt: str
    tokens: int
    max_difference: float
    tolerance: float | None
    divergence: float
    greedy_agreement: float | None
    tie: float | None

    @property
    def passed(self) -> bool:
        if self.tolerance is None:
            return self.divergence <= MAX_DIVERGENCE  # False for NaN
        within = self.max_difference <= self.tolerance
        return within and (self.tie is None or self.tie <= 2 * self.tolerance)

    def __str__(self) -> str:
        found = f"{self.prompt[:48]!r}: max |Δlogit| {self.max_difference:.1e}"
        if self.tolerance is None:
            found += f", KL divergence {self.divergence:.1e} nats, rounded to int8 as it runs"
        if not self.passed:
            found += f" (allowed {self.tolerance or MAX_DIVERGENCE:.1e})"
        return found if self.greedy_agreement is None else f"{found}, greedy agreement {self.greedy_agreement:.0%}"


@dataclass(frozen=True)
class _Expected:
    """The eager model's logits [S, V] of a prompt, its greedy tokens, if wanted, and the gap between its two largest logits at
    each."""

    prompt: str
    ids: list[int]
    logits: NDArray[np.float32]
    greedy: list[int]
    gaps: list[float]


def verify_bundle(loaded: LoadedModel, directory: Path, dtype: str, kv_scales: Sequence[KVScales] = ()) -> list[PromptCheck]:
    """`check_bundle`; raises VerificationError that names the prompts whose difference exceeds rounding."""
    checks = check_bundle(loaded, directory, dtype, kv_scales)
    failed = [str(check) for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            f"the bundle differs from the eager model: {'; '.join(failed)}. Nothing was written. Please report the model's "
            "config; --no-verify writes the bundle all the same"
        )
    return checks


def check_bundle(loaded: LoadedModel, directory: Path, dtype: str, kv_scales: Sequence[KVScales] = ()) -> list[PromptCheck]:
    """A check of every prompt; where int8 rounds, one of exact equals, then one of the bundle as it runs.

    Only the bundle as it runs generates greedy tokens: products with fp32 activations have no fast kernel, and take longer for
    the tokens of a reply than for everything else.

    Args:
        kv_scales: of the bundle's int8 caches.
    """
    rounds = bool(loaded.quantized or kv_scales)
    with ExitStack() as stack:
        exact = stack.enter_context(fp32_activations(directory)) if loaded.quantized else directory
        engine = stack.enter_context(_engine(exact))
        wanted = prompts(engine)
        expected = [_expected(loaded, engine, name, ids, greedy=not rounds, kv_scales=kv_scales) for name, ids in wanted]
        tolerance = max(TOLERANCE[dtype], INT8_KV_TOLERANCE) if kv_scales else TOLERANCE[dtype]
        checks = [_check(engine, one, tolerance) for one in expected]
    if rounds:
        with _engine(directory) as engine:
            unrounded = [_expected(loaded, engine, name, ids, greedy=True) for name, ids in wanted]
            checks += [_check(engine, one, None) for one in unrounded]
    return checks


@contextmanager
def fp32_activations(directory: Path) -> Iterator[Path]:
    """A temporary copy of a bundle inside it, whose low-bit products on the CPU do not round activations; weights are linked."""
    manifest = read_manifest(directory)
    files = dict(manifest.files)
    with tempfile.TemporaryDirectory(prefix=".workspace.", dir=directory) as workspace:
        copy = Path(workspace)
        for name in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            _link(directory / name, copy / name)
        for name in manifest.targets["cpu"].graphs.values():
            model = onnx.load(directory / name, load_external_data=False)
            for node in model.graph.node:
                for attribute in node.attribute:
                    if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                        attribute.i = FP32_ACTIVATIONS
            (copy / name).unlink()  # a linked file would change with its copy
            onnx.save(model, copy / name)
            files[name] = replace(files[name], bytes=(copy / name).stat().st_size)
        (copy / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
        yield copy


def _link(file: Path, copy: Path) -> None:
    """A hard link, as ONNX Runtime rejects symbolic links out of the graph's folder; a copy on disks that have no links."""
    try:
        os.link(file, copy)
    except OSError:
        shutil.copyfile(file, copy)


def _engine(directory: Path) -> Engine:
    return Engine.load(directory, EngineOptions(policy="full", verify=False))


def prompts(engine: Engine) -> list[tuple[str, list[int]]]:
    """Text prompts cut to the cache; without a tokenizer, seeded token ids.

    Raises ModelFilesError where plain text has tokens that the model has no embedding for.
    """
    vocab = engine.manifest.model.vocab_size
    room = max(1, engine.manifest.max_seq_len - GREEDY_TOKENS)
    if engine.tokenizer is not None:
        encoded = [(text, engine.tokenizer.encode(text)) for text in PROMPTS]
        largest = max((max(ids) for _, ids in encoded if ids), default=0)
        if largest >= vocab:
            raise ModelFilesError(
                f"the tokenizer gives plain text the id {largest}, the model's ids end at {vocab - 1}: it belongs to another "
                "model; put the model's own tokenizer.json into its directory, or name it with --tokenizer DIR"
            )
        return [(text.splitlines()[0], ids[:room]) for text, ids in encoded if ids]
    rng = np.random.default_rng(0)
    return [(f"{n} random ids", rng.integers(0, vocab, min(n, room)).tolist()) for n in (1, 7, 24)]


def _expected(
    loaded: LoadedModel, engine: Engine, name: str, ids: list[int], greedy: bool, kv_scales: Sequence[KVScales] = ()
) -> _Expected:
    count = min(GREEDY_TOKENS, engine.manifest.max_seq_len - len(ids) + 1) if greedy else 0
    return _Expected(name, ids, _eager_logits(loaded, ids, kv_scales), *_eager_greedy(loaded, ids, count, kv_scales))


def _check(engine: Engine, expected: _Expected, tolerance: float | None) -> PromptCheck:
    """``tolerance``: relative to the largest logit; None: see PromptCheck."""
    logits = prompt_logits(engine, expected.ids)
    allowed = None if tolerance is None else tolerance * max(1.0, float(np.abs(expected.logits).max()))
    same: list[bool] = []
    if expected.greedy:
        params = GenerationParams(max_new_tokens=len(expected.greedy), ignore_eos=True)
        ours = engine.generate(expected.ids, params)[0].token_ids
        same = [a == b for a, b in zip(ours, expected.greedy, strict=True)]
    return PromptCheck(
        prompt=expected.prompt,
        tokens=len(expected.ids),
        max_difference=float(np.abs(logits - expected.logits).max()),  # NaN stays
        tolerance=allowed,
        divergence=mean_divergence(expected.logits, logits),
        greedy_agreement=sum(same) / len(same) if same else None,
        tie=None if all(same) else expected.gaps[same.index(False)],
    )


def mean_divergence(expected: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """KL(expected ‖ other) of the distributions of logits [S, V], in nats, mean over the tokens."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


def prompt_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """The compiled model's logits [S, V] fp32 for every token of a prompt, from an empty cache."""
    step = engine.backend.context(1).step(0, [len(ids)], [len(ids)])
    step.input_ids[:] = ids
    step.place([0])
    for segment in engine.manifest.segments:
        step.run(segment.name)
    return step.logits.astype(np.float32)


def _eager_logits(loaded: LoadedModel, ids: list[int], kv_scales: Sequence[KVScales]) -> np.ndarray:
    with torch.no_grad():
        return loaded.model(input_ids=torch.tensor([ids]), **_cache(kv_scales)).logits[0].float().numpy()


def _cache(kv_scales: Sequence[KVScales]) -> dict[str, Any]:
    """The eager model's arguments for a cache rounded to int8, or none."""
    return {"past_key_values": rounded_cache(kv_scales), "use_cache": True} if kv_scales else {}


def _eager_greedy(
    loaded: LoadedModel, ids: list[int], count: int, kv_scales: Sequence[KVScales]
) -> tuple[list[int], list[float]]:
    """``count`` greedy tokens by the eager model with its own cache, and the gap between its two largest logits at each."""
    tokens: list[int] = []
    gaps: list[float] = []
    feed, cache = torch.tensor([ids]), rounded_cache(kv_scales) if kv_scales else None
    with torch.no_grad():
        for _ in range(count):
            output = loaded.model(input_ids=feed, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            first, second = output.logits[0, -1].float().topk(2).values.tolist()
            tokens.append(int(output.logits[0, -1].argmax()))
            gaps.append(first - second)
            feed = torch.tensor([[tokens[-1]]])
    return tokens, gaps
