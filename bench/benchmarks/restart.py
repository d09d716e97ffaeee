"""The first token of a long chat that returns: cold, from memory, after a restart and after an eviction.

    python -m benchmarks.restart                      # 3 minutes on 2 cores

SmolLM2-135M-Instruct, int4, with `EngineOptions.prefix_dir`. A restart is another process with the same folder; for the eviction
the KV memory holds one text, so that each chat takes the memory of the one before. Times are until the first token is there, in
an engine that has answered a short request; ratios compare the same chat. Every reply is compared with the cold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer
from tide_bench.build_cache import run_in_process
from tide_bench.bundles import export_bundle
from tide_bench.report import Report

from benchmarks.models.gguf_files import TITLE, smollm2_identity, smollm2_weights
from benchmarks.models.model_folders import CACHE

SLOTS, NEW_TOKENS = 4096, 24
ARMS = {"cold": "cold", "warm": "from memory", "restart": "after a restart", "evicted": "after an eviction"}


class Answer(NamedTuple):
    """``cached``: tokens of the prompt that were not computed."""

    first_ms: float
    prompt: int
    cached: int
    reply: list[int]


def chats(bundle: Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts of about so many tokens: each asks about another part of the Python language reference."""
    from tide_runtime import Engine, EngineOptions

    with Engine.load(bundle, EngineOptions(verify=False)) as engine:
        assert engine.tokenizer is not None
        text = engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
        around = len(engine.chat_prompt([{"role": "user", "content": ""}]))
        parts = [engine.tokenizer.decode(text[start * tokens : (start + 1) * tokens - around]) for start in range(count)]
        return [engine.chat_prompt([{"role": "user", "content": part}]) for part in parts]


def answers(bundle: Path, folder: Path, prompts: Sequence[list[int]], times: int = 1, kv_texts: int = 0) -> list[Answer]:
    """Each of the ``prompts`` in turn, all of them so many ``times``, or each so often where memory holds all.

    Args:
        kv_texts: KV memory, in texts of full length; 0: the engine's default.
    """
    from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

    shared = ThreadOptions(shared=True)
    with Engine.load(bundle, EngineOptions(threads=shared, prefix_dir=folder)) as engine:
        token_bytes = 4 * sum(kv.heads * (kv.key_dim + kv.value_dim) for kv in engine.manifest.kv.values())
        memory = kv_texts * SLOTS * token_bytes or None
        with engine.with_options(EngineOptions(threads=shared, prefix_dir=folder, kv_memory=memory)) as used:
            used.generate([1, 2, 3], GenerationParams(max_new_tokens=2, use_prefix_cache=False))
            found = []
            for prompt in [*prompts] * times if kv_texts else [prompt for prompt in prompts for _ in range(times)]:
                (made,) = used.generate(prompt, GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
                stats = made.stats
                found.append(Answer(1e3 * stats.time_to_first_token, len(prompt), stats.prefix_tokens, list(made.token_ids)))
            return found


def measure(report: Report, bundle: Path, folder: Path, count: int, tokens: int) -> None:
    """First tokens in all four ways, and whether a reply differs from the cold one."""
    prompts = run_in_process(chats, bundle, count, tokens)
    first = run_in_process(answers, bundle, folder / "kept", prompts, 2)
    found = {
        "cold": first[::2],
        "warm": first[1::2],
        "restart": run_in_process(answers, bundle, folder / "kept", prompts),
        "evicted": run_in_process(answers, bundle, folder / "small", prompts, 2, 1)[count:],
    }
    cells = []
    wrong = 0
    for arm, made in found.items():
        ratios = [one.first_ms / cold.first_ms for one, cold in zip(made, found["cold"], strict=True)]
        wrong += sum(one.reply != cold.reply for one, cold in zip(made, found["cold"], strict=True))
        report.add(f"first_token_ms_{arm}", median(one.first_ms for one in made))
        if arm != "cold":
            report.add(f"{arm}_over_cold", median(ratios))
        report.rows += [{"arm": arm, "first_ms": one.first_ms, "prompt": one.prompt, "cached": one.cached} for one in made]
        cached = 100 * sum(one.cached for one in made) / sum(one.prompt for one in made)
        cells.append([ARMS[arm], f"{report.results[f'first_token_ms_{arm}']:.0f}", f"{median(ratios):.3f}", f"{cached:.1f}"])
    report.add("restart_wrong", wrong)
    size = sum(path.stat().st_size for path in (folder / "kept").rglob("*") if path.is_file())
    report.add("disk_bytes_per_token", size / sum(len(prompt) + NEW_TOKENS for prompt in prompts))
    columns = ["chat", "first token, ms", "over cold", "of the prompt cached, %"]
    report.table(f"A chat of {tokens} tokens that returns", columns, cells, f"{TITLE}, int4. Medians of {count} chats.")


def main(
    count: Annotated[int, typer.Option("--chats", min=1, help="Chats, each in all four ways.")] = 7,
    tokens: Annotated[int, typer.Option(min=64, max=3900, help="Of a chat's prompt.")] = 2000,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure chats that return."""
    report = Report("restart", chats=count, tokens=tokens)
    folder = cache / "smollm2" / f"int4_{SLOTS}"
    bundle = export_bundle(smollm2_weights(cache), smollm2_identity(), folder, max_seq_len=SLOTS, weights="int4")
    with TemporaryDirectory(dir=cache) as kept:
        measure(report, bundle, Path(kept), count, tokens)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
