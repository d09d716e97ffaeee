"""The first token of a long chat that returns: cold, from memory, after a restart and after an eviction; and damaged files.

    python -m benchmarks.restart                      # 6 minutes on 2 cores
    python -m benchmarks.restart --damaged 40

SmolLM2-135M-Instruct, int4, with `EngineOptions.prefix_dir`. A restart is another process with the same folder; for the eviction
the KV memory holds one text, so that each chat takes the memory of the one before. Times are until the first token is there, in
an engine that has answered a short request; ratios compare the same chat. Every reply is compared with the cold one.

Damaged: one file of a chat has flipped bits, is cut short, is empty, holds another text's block, has another digest, or holds the
same block of another bundle (the GGUF file's own Q4_1 weights). A new process answers the chat.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer
from tide_bench.build_cache import run_in_process
from tide_bench.bundles import export_bundle
from tide_bench.report import Report

from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.models.model_folders import CACHE

SMOLLM2 = GGUF_MODELS["smollm2"]
SLOTS, NEW_TOKENS = 4096, 24
SHORT = 400  # tokens of the chats whose files are damaged
AT_ONCE = 20  # of them in a process
ARMS = {"cold": "cold", "warm": "from memory", "restart": "after a restart", "evicted": "after an eviction"}


class Answer(NamedTuple):
    """``cached``: tokens of the prompt that were not computed."""

    first_ms: float
    prompt: int
    cached: int
    reply: list[int]


def exported(form: str, weights: Path, cache: Path) -> Path:
    folder = cache / "smollm2" / f"{form}_{SLOTS}"
    return export_bundle(weights, SMOLLM2.identity(), folder, max_seq_len=SLOTS, form=form)


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
    cells, wrong = [], 0
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
    report.table(f"A chat of {tokens} tokens that returns", columns, cells, f"{SMOLLM2.title}, int4. Medians of {count} chats.")


def damages(random: Random) -> dict[str, Callable[[bytes, bytes, bytes], bytes]]:
    """What becomes of a file, given itself, one of another text and the same block of another bundle."""

    def flipped(own: bytes, low: int, high: int) -> bytes:
        place = random.randrange(low, high)
        return own[:place] + bytes([own[place] ^ 1 << random.randrange(8)]) + own[place + 1 :]

    return {
        "a flipped bit": lambda own, text, bundle: flipped(own, 32, len(own)),
        "cut short": lambda own, text, bundle: own[: random.randrange(1, len(own))],
        "empty": lambda own, text, bundle: b"",
        "another text's": lambda own, text, bundle: text,
        "another digest": lambda own, text, bundle: flipped(own, 0, 32),
        "another bundle's": lambda own, text, bundle: bundle,
    }


def blocks(bundle: Path, folder: Path, prompts: Sequence[list[int]]) -> list[list[Path]]:
    """Have an engine write the files of the prompts' blocks; their paths by prompt."""
    from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

    found, known = list[list[Path]](), set[Path]()
    for prompt in prompts:
        with Engine.load(bundle, EngineOptions(threads=ThreadOptions(shared=True), prefix_dir=folder)) as engine:
            engine.generate(prompt, GenerationParams(max_new_tokens=1))
        new = [path for path in folder.rglob("*") if path.is_file() and path not in known]
        known.update(new)
        found.append(sorted(new, key=lambda path: path.stat().st_mtime_ns, reverse=True))
    return found


def damage(report: Report, bundle: Path, other: Path, folder: Path, count: int) -> None:
    """Damage a file of each of ``count`` chats, in new processes of some chats each."""
    prompts = run_in_process(chats, bundle, AT_ONCE, SHORT)
    wanted = [one.reply for one in run_in_process(answers, bundle, folder / "whole", prompts)]
    paths = run_in_process(blocks, bundle, folder / "blocks", prompts)
    foreign = run_in_process(blocks, other, folder / "foreign", prompts)
    crashes, wrong, tally = 0, 0, dict[str, int]()
    random = Random(0)
    kinds = damages(random)
    for start in range(0, count, AT_ONCE):
        used = folder / "damaged"
        shutil.copytree(folder / "blocks", used)
        for number in range(min(AT_ONCE, count - start)):
            own, name = random.choice(paths[number]), [*kinds][(start + number) % len(kinds)]
            place = paths[number].index(own)
            given = (one.read_bytes() for one in (own, random.choice(paths[number - 1]), foreign[number][place]))
            (used / own.relative_to(folder / "blocks")).write_bytes(kinds[name](*given))
            tally[name] = tally.get(name, 0) + 1
        try:
            found = run_in_process(answers, bundle, used, prompts)
            wrong += sum(one.reply != reply for one, reply in zip(found, wanted, strict=True))
        except BrokenProcessPool:
            crashes += 1
        shutil.rmtree(used)
    report.add("damaged_files", sum(tally.values()))
    report.add("damaged_crashes", crashes)
    report.add("damaged_wrong", wrong)
    kinds_of = ", ".join(f"{number} {name}" for name, number in tally.items())
    report.statement("Damaged files", f"{sum(tally.values())} files ({kinds_of}): {crashes} crashes, {wrong} wrong texts.")


def main(
    count: Annotated[int, typer.Option("--chats", min=1, help="Chats, each in all four ways.")] = 7,
    tokens: Annotated[int, typer.Option(min=64, max=3900, help="Of a chat's prompt.")] = 2000,
    damaged: Annotated[int, typer.Option(min=0, help="Files to damage.")] = 200,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure chats that return, and damage the files of some."""
    report = Report("restart", chats=count, tokens=tokens, damaged=damaged)
    bundle = exported("int4", SMOLLM2.weights(cache), cache)
    with TemporaryDirectory(dir=cache) as folder:
        measure(report, bundle, Path(folder), count, tokens)
        if damaged:
            damage(report, bundle, exported("source", SMOLLM2.source(cache), cache), Path(folder), damaged)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
