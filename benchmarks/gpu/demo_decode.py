"""The demo model on a GPU with target `torch`: eager's tokens in fp32 under every policy, loops on the device that generate what
the host's do, and ms a token. Prompts are beginnings of files that the model was not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from tide_bench.arms.base import ArmDevice
from tide_bench.arms.eager import EagerArm
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.gpu.carried_bundle import unpack
from benchmarks.gpu.decode_loop import compare, complaint
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.model_shapes import DEMO, dtype_of

TARGET = "torch"
_HELD_OUT = DEMO.parent / "held_out.txt"
_PROMPT, _TEXTS, _REPEATS = 32, 16, 3
_NEW, _DRY_NEW = 64, 6
_LARGEST_GAP = 1e-3  # between the logits of two tokens that are a tie in fp32, where sums have another order


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """``argument``: fp32, fp16 or int4."""
    demo = _Demo(bench, argument)
    yield KitCase("unpacked", demo.unpacked, demo.unpacked)
    if argument != "int4":
        yield KitCase("eager", demo.eager_speed, demo.eager_speed)
    for policy in ("full", "exit", "exact"):
        for rows in (1, 8):
            decode = partial(demo.decode, policy, rows)
            yield KitCase(f"{policy}_b{rows}", decode, decode)
    for policy in ("full", "exit"):
        for rows in (1, 4):
            loop = partial(demo.loop, policy, rows)
            yield KitCase(f"loop_{policy}_b{rows}", loop, loop)


class _Demo:
    def __init__(self, bench: Bench, dtype: str) -> None:
        self._bench, self._dtype = bench, dtype
        self._new, self._repeats = (_DRY_NEW, 1) if bench.dry else (_NEW, _REPEATS)

    def unpacked(self) -> Figures:
        return {"bytes": sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())}

    @property
    def _folder(self) -> Any:
        name = f"demo_{self._dtype}"
        return unpack(self._bench.carried / name, self._bench.work / "bundles" / name, self._bench.device)

    def eager_speed(self) -> Figures:
        arm, figures = eager(self._bench.device, self._dtype), {}
        for rows in (1, 8):
            arm.generate(prompts(rows), 4)
            made = [arm.generate(prompts(rows), self._new) for _ in range(self._repeats)]
            figures[f"b{rows}_ms"] = median(timing.decode_ms_per_token for timing in made)
        return figures

    def decode(self, policy: str, rows: int) -> Figures:
        """Share of the tokens that are eager's (in fp32 all but ties, or AssertionError; under `exit` others may be right), what
        drives, ms a token, and of `exit` the mean depth."""
        with self._engine(policy, rows) as engine:
            texts, ms, depths = list[list[int]](), list[float](), list[int]()
            some = prompts(rows if self._bench.dry else _TEXTS)
            for first in range(0, len(some), rows):
                given = some[first : first + rows]
                for _ in range(self._repeats if first == 0 else 1):
                    made = engine.generate(given, GenerationParams(max_new_tokens=self._new, ignore_eos=True))
                    ms.append(1e3 * max(row.stats.decode_time for row in made) / (self._new - 1))
                texts += [list(row.token_ids) for row in made]
                depths += [depth for row in made for depth in row.stats.token_depths]
            figures: Figures = {"drive": str(engine.drive), "ms": median(ms[1:] or ms), "first_ms": ms[0]}
            if depths:
                figures["mean_depth"] = sum(depths) / len(depths)
        if self._dtype != "int4":
            figures |= self._against_eager(some, texts)
            right = figures["largest_gap"] <= _LARGEST_GAP
            assert right or self._dtype != "fp32" or policy == "exit", f"tokens are not eager's: {figures}"
        return figures

    def _against_eager(self, given: list[list[int]], texts: list[list[int]]) -> Figures:
        """``largest_gap``: between eager's logits of its token and of ours, where a text leaves eager's."""
        model = eager(self._bench.device, self._dtype).model
        reference = eager_texts(self._bench.device, self._dtype, len(given), self._new)
        gaps = []
        for prompt, ours, theirs in zip(given, texts, reference, strict=True):
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if place is not None:
                ids = torch.tensor([prompt + theirs[:place]], device=self._bench.device)
                with torch.no_grad():
                    logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
                gaps.append((logits[theirs[place]] - logits[ours[place]]).item())
        same = sum(a == b for ours, theirs in zip(texts, reference, strict=True) for a, b in zip(ours, theirs, strict=True))
        return {
            "texts": len(texts),
            "texts_that_differ": len(gaps),
            "as_eager": same / sum(map(len, texts)),
            "largest_gap": max(gaps, default=0.0),
        }

    def loop(self, policy: str, rows: int) -> Figures:
        """See `compare`. Raises AssertionError when a text is not the host's, or the host drove."""
        with self._engine(policy, rows) as engine:
            if self._bench.dry:
                return {"drive": str(engine.drive)}
            figures = compare(engine, prompts(rows))
        wrong = complaint(policy, figures)
        assert wrong is None, f"{wrong}: {figures}"
        return figures

    def _engine(self, policy: str, rows: int) -> Engine:
        options = EngineOptions(target=TARGET, policy=policy, max_batch=rows, verify=False, device=self._bench.device)
        return Engine.load(self._folder, options)


@cache
def eager(device: str, dtype: str) -> EagerArm:
    torch.backends.cuda.matmul.allow_tf32 = False
    return EagerArm(DEMO, ArmDevice(device, dtype_of(dtype)))


@cache
def eager_texts(device: str, dtype: str, texts: int, new_tokens: int) -> list[list[int]]:
    return eager(device, dtype).generate(prompts(texts), new_tokens).tokens


@cache
def prompts(rows: int) -> list[list[int]]:
    """``rows`` prompts of `_PROMPT` tokens, at equal distances in the held-out text."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(_HELD_OUT.read_text(encoding="utf-8")).ids
    step = (len(tokens) - _PROMPT) // _TEXTS
    return [tokens[first : first + _PROMPT] for first in range(0, rows * step, step)]
