"""Whether target `torch` gives the texts of target `cpu`, and low-bit weights the logits of the dequantised model.

    python -m benchmarks.target_identity                                  # the demo model and SmolLM2-135M, 100 texts each
    python -m benchmarks.target_identity --models demo --texts 20 --device cuda

Both targets are in one bundle in fp32, whose exits, the model's own head at two checkpoints, are sure at half the probability, so
that some tokens leave and some do not. Greedy texts of policies `full`, `exact` and `exit`, one request at a time and eight. Two
correct programs may differ where two logits are nearly equal.

`torch_int4_difference` is of int4 weights on target torch against the eager model with their dequantised values: the largest
difference of a token's log-probability, over the largest log-probability of the text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from tide_bench.bundles import export_bundle, with_exits, write_changed
from tide_bench.output_checks import first_difference
from tide_bench.prompts import read_prompts
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.models.calibrated_bundles import demo_identity
from benchmarks.models.gguf_files import smollm2_file, smollm2_identity
from benchmarks.models.model_folders import CACHE, DEMO_MODELS

MODELS = ("demo", "smollm2")
POLICIES = ("full", "exact", "exit")
BATCHES = (1, 8)
SLOTS, PROMPT_TOKENS = 256, 48
SURE = 0.5  # probability of the likeliest token at an exit
TARGETS = ("cpu", "torch")
INT4_TEXTS = 4


def bundle_of(model: str, cache: Path) -> Path:
    """The bundle of both targets in fp32, with exits."""
    if model == "demo":
        source = DEMO_MODELS / "layerskip"
        identity = demo_identity("layerskip")
    else:
        source = smollm2_file()
        identity = smollm2_identity()
    folder = cache / model / "target_identity"
    bundle = export_bundle(source, identity, folder, max_seq_len=SLOTS, weights="fp32", targets=TARGETS)
    changed = folder / "exits"
    if not changed.exists():
        manifest = read_manifest(bundle)
        made = with_exits(manifest, [manifest.checkpoints[0], manifest.checkpoints[-1]])
        assert made.calibration is not None
        exits = [replace(one, exact_threshold=SURE, exit_threshold=SURE) for one in made.calibration.exits]
        write_changed(bundle, changed, replace(made, calibration=replace(made.calibration, exits=exits)))
    return changed


def options_of(target: str, policy: str, rows: int, device: str) -> EngineOptions:
    on = "cpu" if target == "cpu" else device
    return EngineOptions(target=target, policy=policy, max_batch=rows, device=on, threads=ThreadOptions(), prefix_cache=False)


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Windows of modules of Python's library, from their first tokens on."""
    texts = read_prompts(None, engine.tokenizer)
    starts = range(0, 4 * count, PROMPT_TOKENS)
    found = [text[i : i + PROMPT_TOKENS] for i in starts for text in texts if len(text) >= i + PROMPT_TOKENS]
    return found[:count]


def differing(bundle: Path, policy: str, rows: int, texts: int, new_tokens: int, device: str) -> list[int]:
    """The first token that differs, of each text that does."""
    made = []
    for target in TARGETS:
        with Engine.load(bundle, options_of(target, policy, rows, device)) as engine:
            params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True)
            made.append([list(one.token_ids) for one in engine.generate(prompts_of(engine, texts), params)])
    places = (first_difference(ours, theirs) for ours, theirs in zip(*made, strict=True))
    return [place for place in places if place is not None]


def int4_difference(device: str) -> float:
    """The largest difference of a token's log-probability between target torch with int4 weights and the eager model with their
    dequantised values, over the largest log-probability: the demo model, its prompts."""
    import torch

    from tide_export.config import ExportConfig
    from tide_export.export import quantize_loaded, write_bundle
    from tide_export.load import load_model
    from tide_export.progress import ExportProgress

    quiet = ExportProgress(quiet=True)
    loaded = quantize_loaded(load_model(str(DEMO_MODELS / "layerskip"), "fp32"), "int4", "rtn", quiet)
    with TemporaryDirectory() as folder:
        config = ExportConfig(max_seq_len=SLOTS, verify=False, targets=("torch",), checkpoints="8", weights="int4")
        write_bundle(loaded, Path(folder), config, quiet)
        with Engine.load(folder, replace(options_of("torch", "full", 1, device), verify=False)) as engine:
            ids = [text[:SLOTS] for text in read_prompts(None, engine.tokenizer)[:INT4_TEXTS]]
            ours = [np.array(score.logprobs) for score in engine.score_many([(one, 1) for one in ids])]
    worst = 0.0
    for one, found in zip(ids, ours, strict=True):
        with torch.no_grad():
            logits = loaded.model(torch.tensor([one])).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(one[1:])[:, None])[:, 0].numpy()
        worst = max(worst, float(abs(found - theirs).max() / abs(theirs).max()))
    return worst


def main(
    models: Annotated[str, typer.Option(help="of: demo, smollm2; a comma between two.")] = ",".join(MODELS),
    texts: Annotated[int, typer.Option(help="of each model, policy and batch size.")] = 100,
    new_tokens: Annotated[int, typer.Option(help="of each text.")] = 24,
    device: Annotated[str, typer.Option(help="of target torch: cpu or cuda.")] = "cpu",
    cache: Annotated[Path, typer.Option(help="where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="write the results here.")] = None,
) -> None:
    report = Report("target_identity", models=models, texts=texts, new_tokens=new_tokens, device=device)
    rows = list[list[str]]()
    differ = 0
    for model in models.split(","):
        bundle = bundle_of(model, cache)
        for policy in POLICIES:
            for batch in BATCHES:
                places = differing(bundle, policy, batch, texts, new_tokens, device)
                differ += len(places)
                rows.append([model, policy, str(batch), str(texts), str(len(places)), ", ".join(map(str, places)) or "–"])
                print(*rows[-1], sep=" | ", flush=True)
    headings = ("model", "policy", "batch", "texts", "differ", "first differing tokens")
    report.table("Target torch against target cpu, fp32", headings, rows)
    report.add("torch_differs", differ)
    report.add("torch_int4_difference", int4_difference(device))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
