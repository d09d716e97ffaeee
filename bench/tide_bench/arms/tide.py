"""TIDE's own arm: any depth policy on a bundle, by `Engine`; also runs the unsplit graph, a bundle that is cut nowhere."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter

from tide_runtime import DepthOptions, Engine, EngineOptions, Generation, GenerationParams, ThreadOptions

from tide_bench.arms.base import ArmDevice, Timing


class TideArm:
    """One shared thread pool, as `tide-run` has it; every policy and batch size is an engine on the same weights."""

    def __init__(self, folder: Path, device: ArmDevice | None = None) -> None:
        self.folder = folder
        self.device = device or ArmDevice()
        self._loaded = load_engine(folder, self.device) if self.device.is_gpu else load_second(folder, self.device)
        self._engines: dict[tuple[str, float | None, int, str], Engine] = {}
        self._calls = count()

    def generate(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        policy: str = "full",
        threshold: float | None = None,
        bits: str = "same",
    ) -> Timing:
        """Raises ParamsError when the bundle cannot run the policy.

        Args:
            threshold: replaces the certified ones of ``exit``.
            bits: see `EngineOptions`.
        """
        engine = self._engine(policy, threshold, len(prompts), bits)
        # Prompts come again, in warm-ups for one: drafts from an earlier call's outputs would copy the answer.
        params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True, cache_salt=f"call {next(self._calls)}")
        drive = str(engine.drive) if self.device.is_gpu else None
        return replace(timed(engine, prompts, params), limitation=limitation(engine), drive=drive)

    def load_again(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Load the model once more and generate: what is timed where loading is."""
        with load_engine(self.folder, self.device) as engine:
            engine.generate(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, every layer run."""
        return logits_gap(self._engine("full", None, 1), text, one, other)

    def _engine(self, policy: str, threshold: float | None, rows: int, bits: str = "same") -> Engine:
        key = policy, threshold, rows, bits
        if key not in self._engines:
            depth = DepthOptions(threshold=threshold)
            options = replace(self._loaded.options, policy=policy, depth=depth, max_batch=rows, bits=bits)
            self._engines[key] = self._loaded.with_options(options)
        return self._engines[key]


def timed(engine: Engine, prompts: Sequence[Sequence[int]], params: GenerationParams) -> Timing:
    """``prompts`` generated together: decoding is what follows the last one's first token."""
    start = perf_counter()
    done = engine.generate([list(prompt) for prompt in prompts], params)
    wall = perf_counter() - start
    first = max(one.stats.time_to_first_token for one in done)
    layers = sum(one.stats.layers_per_token for one in done) / len(done)
    return Timing([list(one.token_ids) for one in done], first, wall - first, layers, mean_depth(done, engine.depth))


def limitation(engine: Engine) -> str | None:
    """What ``engine`` runs in place of the policy that it was asked for, or how this machine limits it; None: neither."""
    if engine.bits_limitation is not None and engine.options.bits == "same":
        return engine.bits_limitation.split(":")[0]  # the engine has warned in full
    asked = engine.options.policy
    runs = engine.policy.name
    return None if runs == asked else f"{asked} runs {runs}"


def load_engine(folder: Path, device: ArmDevice | None = None) -> Engine:
    """An engine on ``device``, where all arms are; None: the CPU. It caches no prefixes, as other arms cache none."""
    device = device or ArmDevice()
    threads = ThreadOptions(shared=True)
    options = EngineOptions(target=device.target, device=device.name, threads=threads, prefix_cache=False, verify=False)
    return Engine.load(folder, options)


def load_second(folder: Path, device: ArmDevice | None = None) -> Engine:
    """An engine loaded after another one that is gone again.

    What a process loads first was found to run some percent faster than the same loaded later: a whole graph has all of
    that, of a bundle in segments the first one only. So no engine that is compared is its process' first.
    """
    load_engine(folder, device).close()
    gc.collect()
    return load_engine(folder, device)


def mean_depth(rows: Sequence[Generation], num_layers: int) -> float:
    """Mean layers run for a token, over the tokens after the first; where there are none, ``num_layers``."""
    depths = [depth for row in rows for depth in row.stats.token_depths or [num_layers] * (row.stats.new_tokens - 1)]
    return sum(depths) / len(depths) if depths else float(num_layers)


@dataclass(frozen=True)
class Reading:
    """What a policy made of one text: at every place it answers, and the text goes on regardless, so that answers of different
    policies are about the same text before them, as the certificate's are.

    Args:
        answers: its likeliest token at every place after the prompt's first one, [N].
        decode_s: seconds for these N tokens.
        layers: decoder layers launched for them.
    """

    answers: list[int]
    decode_s: float
    layers: int


def read_text(engine: Engine, text: Sequence[int], prompt_tokens: int) -> Reading:
    """Read ``text`` with the engine's policy. The first token after the prompt is left out: the prompt's full pass gives it."""
    (score,) = engine.score_many([(text, prompt_tokens)], decode=True)
    return Reading(score.argmax[1:], score.decode_s, score.layers)


def logits_gap(engine: Engine, text: Sequence[int], one: int, other: int) -> float:
    """Distance of two tokens' logits behind ``text``, by the engine's policy."""
    first, second = (engine.score([*text, token], len(text)).logprobs[0] for token in (one, other))
    return abs(first - second)
