"""An EAGLE-3 head and an MTP layer, trained here for a demo model, saved as public tools save them, imported, and run by `exact`.

    python -m benchmarks.drafters                        # 12 minutes on one core, most of them training
    python -m benchmarks.drafters --steps 60 --replies 96 --prompts 4     # two minutes: poor drafters, the same path

Both learn from the model's own replies to pieces of held-out files, 48 tokens each, and are measured on other files. The MTP
layer is MiMo's: the demo's weights are saved as a MiMo checkpoint, whose model is the same with biases of zero.

accepted   tokens per verification: decoded tokens over runs to the last layer, where the head alone drafts.
speedup    decoding by `full` over `exact`, the same bundle in turn: with the head alone, and as a user gets it (text drafts too).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Annotated

import torch
import typer
from tide_bench.report import Report
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams

from benchmarks.arms.turns import EngineArm, Turn, take_turns
from benchmarks.drafters.public_forms import new_eagle3, trainable, write_eagle3, write_mimo, write_mtp
from benchmarks.drafters.training import train, write_text
from benchmarks.held_out import held_out_prompts
from benchmarks.models.model_folders import DEMO_MODELS
from tide_export import ExportConfig, export
from tide_export.drafters.mtp import MtpDrafter, load_mtp
from tide_export.load import load_model

PROMPT_TOKENS = 48
DRAFT_VOCABULARY = 1024
CACHE_SLOTS = 512
MODEL = DEMO_MODELS / "layerskip"


def train_both(folder: Path, replies: int, steps: int, seed: int, report: Report) -> None:
    """Write ``folder``/eagle3 and the checkpoint ``folder``/mimo."""
    loaded = load_model(str(MODEL), "fp32")
    loaded.model.requires_grad_(False)
    write_mimo(loaded, MODEL, folder / "mimo")
    layers, began = loaded.num_layers, perf_counter()
    taps = (2, layers // 2, layers - 3)
    text = write_text(loaded, torch.tensor(_prompts(replies, "library")), (*taps, layers), seed)
    written = perf_counter()
    counts = torch.cat([group.ids.flatten() for group in text.groups]).bincount(minlength=loaded.model.config.vocab_size)
    head = new_eagle3(loaded, taps, counts.topk(DRAFT_VOCABULARY).indices.sort().values, seed)
    losses = {"eagle3": train(head, text, steps, seed)}
    write_eagle3(head, loaded, folder / "eagle3")
    mimo = load_mtp(load_model(str(folder / "mimo"), "fp32")).drafter
    assert isinstance(mimo, MtpDrafter)
    trainable(mimo)
    losses["mtp"] = train(mimo, text, steps, seed)
    write_mtp(mimo, folder / "mimo")
    seconds = {"reply_seconds": written - began, "training_seconds": perf_counter() - written}
    report.settings |= {"reply_tokens": text.tokens, "losses": losses, **seconds}


def bundle_of(source: Path, draft_head: str, folder: Path) -> Path:
    export(str(source), folder, ExportConfig(max_seq_len=CACHE_SLOTS, targets=("cpu",), draft_head=draft_head), force=True)
    return folder


def compare(report: Report, bundles: Mapping[str, Path], prompts: list[list[int]], params: GenerationParams, rounds: int) -> None:
    """`full` and, beside it, `exact` with the head alone and with all drafters; one prompt a turn."""
    rows, differ = [], 0
    drafting = {"head alone": DepthOptions(draft="head"), "all drafts": DepthOptions()}
    for name, bundle in bundles.items():
        with ExitStack() as stack:
            full = stack.enter_context(Engine.load(bundle, EngineOptions(policy="full", max_batch=1), device="cpu"))
            options = {title: replace(full.options, policy="exact", depth=depth) for title, depth in drafting.items()}
            arms = {title: EngineArm(title, stack.enter_context(full.with_options(one))) for title, one in options.items()}
            base, turns = _turns(EngineArm("full", full), arms, prompts, params, rounds)
        for title, own in turns.items():
            differ += sum(ours.tokens != theirs.tokens for ours, theirs in zip(own, base, strict=True))
            accepted = sum(turn.decoded for turn in own) / sum(turn.passes for turn in own)
            drafted, held = (sum(getattr(turn, name)["head"] for turn in own) for name in ("drafted", "accepted"))
            right = f"{100 * held / drafted:.0f}%" if drafted else ""
            rows.append([name, title, f"{accepted:.2f}", right, f"{_speedup(own):.2f}x"])
            kind = "" if title == "head alone" else "_with_text"
            report.add(f"{name}_accepted{kind}", accepted)
            report.add(f"{name}_speedup{kind}", _speedup(own))
    report.table("exact against full", ["drafter", "drafts", "tokens a verification", "head's right", "speedup"], rows)
    report.add("draft_differs", differ)


def _turns(
    base: EngineArm, arms: Mapping[str, EngineArm], prompts: list[list[int]], params: GenerationParams, rounds: int
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    for arm in (base, *arms.values()):
        arm.turn(prompts[:1], params)  # binds every shape first
    return take_turns(base, arms, [[prompt] for _ in range(rounds) for prompt in prompts], params)


def _speedup(turns: list[Turn]) -> float:
    return geometric_mean(turn.base_seconds / turn.seconds for turn in turns)


def _prompts(count: int, source: str) -> list[list[int]]:
    return [prompt.ids for prompt in held_out_prompts(count, PROMPT_TOKENS, source)]


def main(
    replies: Annotated[int, typer.Option(min=8, help="Replies of the model to learn from, of 112 tokens.")] = 384,
    steps: Annotated[int, typer.Option(min=10, help="Steps of training, of four replies each.")] = 400,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each text.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at every prompt.")] = 3,
    seed: Annotated[int, typer.Option(help="Of replies and training.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Keep what is trained there, or take it from there.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Train two drafters, import them from public formats, and run them."""
    report = Report("drafters", replies=replies, steps=steps, prompts=prompts, new_tokens=new_tokens, rounds=rounds, seed=seed)
    with tempfile.TemporaryDirectory() as scratch:
        place, texts = folder or Path(scratch), _prompts(prompts, "demo")
        if not (place / "eagle3").is_dir():
            train_both(place, replies, steps, seed, report)
        sources = {"eagle3": (MODEL, f"eagle3:{place / 'eagle3'}"), "mtp": (place / "mimo", "mtp")}
        bundles = {name: bundle_of(source, head, Path(scratch) / "bundles" / name) for name, (source, head) in sources.items()}
        params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True)
        compare(report, bundles, texts, params, rounds)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
