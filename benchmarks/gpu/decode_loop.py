"""Whether device-driven decoding generates the host's tokens: one CUDA graph for many tokens against the host's loop.

Policies `full` and `exit`, the latter with exits that some of the tokens take, one condition inside
the other; whole texts, and texts that an EOS token ends in the middle of a launch. In fp16 with ONNX Runtime, whose fp32
attention needs the host; in fp32 with TensorRT's engines, the only ones whose exits the device can evaluate: small differences
then decide about few tokens. The GPU kit runs this.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.device_loop.policy import DrivenDepth
from tide_runtime.outputs import Generation, finished
from tide_runtime.scheduling.step import run

_NEW, _ENDS = 96, 3  # new tokens; EOS tokens that are tried
Prompts = list[list[int]]


def compare(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """Why the host drove (``reason``, None: it did not), in which form the device did, texts that differ, ms a token, how often
    the host waited for each token, and the share of tokens that left early, and that took whichever way out was taken least.

    Tokens that come up for the first time at several places serve as EOS: they do not all stand at the end of a launch.
    """
    if engine.drive.reason is not None:
        return {"reason": engine.drive.reason}
    device, context = cast(DrivenDepth, engine.drive.policy), engine.backend.context(len(prompts))

    def generated(policy: DepthPolicy, *eos: int) -> list[Generation]:
        return generate(engine, context, policy, prompts, eos)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        generated(device)  # its first launch is the host's, the others are the graph's
        with counted_waits(engine.backend.device) as waits:  # type: ignore[attr-defined]
            driven = generated(device)
        whole = driven, generated(device.inner)
        ends = list(dict.fromkeys(whole[1][0].token_ids))[-_ENDS:]
        pairs = [whole, *((generated(device, end), generated(device.inner, end)) for end in ends)]
    refused = [str(warning.message) for warning in heard if "driven from the host" in str(warning.message)]
    texts = [(ours.token_ids, theirs.token_ids) for pair in pairs for ours, theirs in zip(*pair, strict=True)]
    depths = [depth for row in whole[0] for depth in row.stats.token_depths]
    ways = [*(exit.depth for exit in device.exits), engine.depth]
    return {
        "reason": refused[0] if refused else None,
        "texts": len(texts),
        "different": sum(ours != theirs for ours, theirs in texts),
        "form": str(engine.drive),
        "nodes": dict(device.drivers.execution.node_types) if device.drivers.execution is not None else {},
        "host_waits_per_token": waits[0] / max(row.stats.new_tokens for row in driven),
        "device_ms_per_token": ms_per_token(whole[0]),
        "host_ms_per_token": ms_per_token(whole[1]),
        "left_early": float(np.mean(np.array(depths) < engine.depth)) if depths else 0.0,
        "least_taken": min(float(np.mean(np.array(depths) == way)) for way in ways) if depths else 0.0,
    }


def generate(
    engine: Engine, context: ExecutionContext, policy: DepthPolicy, prompts: Prompts, eos: tuple[int, ...]
) -> list[Generation]:
    """Over the same caches each time: what was captured belongs to them."""
    sequences = engine.admission.sequences(prompts, GenerationParams(max_new_tokens=_NEW, eos_token_ids=eos))
    for _ in run(policy, context, sequences):
        pass
    return [finished(sequence, policy.name, None) for sequence in sequences]


@contextmanager
def counted_waits(device: Any) -> Iterator[list[int]]:
    """A list whose one number is how often the host has waited for ``device``; a launch of 16 tokens needs one wait."""
    wait, count = device.synchronize, [0]

    def counting() -> None:
        count[0] += 1
        wait()

    device.synchronize = counting
    try:
        yield count
    finally:
        device.synchronize = wait


def ms_per_token(rows: list[Generation]) -> float:
    return max(1e3 * row.stats.decode_time / (row.stats.new_tokens - 1) for row in rows)


def complaint(policy: str, row: dict[str, Any]) -> str | None:
    """What is wrong with a row; None: nothing."""
    if row["reason"] is not None:
        return f"the host drove: {row['reason']}"
    if row["different"]:
        return f"{row['different']} of {row['texts']} texts are not the host's"
    if policy == "exit" and row["least_taken"] == 0:
        return f"{row['left_early']:.0%} of the tokens left early, at some exit or at the end none: not every way out was tried"
    return None
