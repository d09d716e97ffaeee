"""Train the demo models of Python source code on any CPU or GPU: the Llamas `stock` and `layerskip`, and `looped`, an Ouro model.

    python examples/train_demo_model.py layerskip --out my_model --state my_state --tokens 10_000_000
    python examples/train_demo_model.py looped --out looped --state state --warm-start examples/demo_model/layerskip

A run can be stopped (Ctrl-C) and continued by the same command; `touch my_state/decay` ends it early and well.
The parts are in `demo_training/`. Needs the `[export]` extra (torch, transformers).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from demo_training.corpus import Corpus, training_batch
from demo_training.evaluation import exit_agreement, greedy, held_out_loss, held_out_windows, prompts_from, repeated_share
from demo_training.looped import StackedOuro
from demo_training.model import StackedLlama
from demo_training.model_folder import environment, load_config, load_stacked, stacked, to_causal_lm, write_model_folder
from demo_training.optimizer import Schedule
from demo_training.trainer import Recipe, Trainer
from demo_training.variants import VARIANTS, Variant
from rich.console import Console

DEMO_MODEL = Path(__file__).parent / "demo_model"
HELD_OUT_TOKENS = 1 << 18  # of each stream, at most
EXIT_PROMPTS = {"prompts": 16, "prompt_tokens": 64, "new_tokens": 64}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False, help=__doc__)
console = Console()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_up(threads: int) -> None:
    """Process-wide settings: threads, and no denormals, which slow a CPU down a hundredfold."""
    torch.set_flush_denormal(True)
    if threads:
        torch.set_num_threads(threads)


def measure(model: StackedLlama, corpus: Corpus, length: int) -> dict[str, Any]:
    """Held-out losses and exit agreement of a model, as they stand in its record."""
    held_out = {}
    for name, stream in corpus.held_out.items():
        if len(stream) > length:
            ends = [*(model.exit_depths if model.loops > 1 else ()), model.depth]
            losses, tokens = held_out_loss(model, stream, length, HELD_OUT_TOKENS, ends)
            held_out[name] = {"tokens": tokens, "loss": round(losses[model.depth], 4)}
            if model.loops > 1:
                held_out[name]["loops"] = {loop: round(loss, 4) for loop, loss in enumerate(losses.values(), 1)}
    return {"held_out": held_out, "exits": measure_exits(model, corpus, length)}


def measure_exits(model: StackedLlama, corpus: Corpus, length: int) -> dict[str, Any]:
    """Agreement of early exits with the full model, on its own greedy text and on held-out text."""
    stream = corpus.held_out["stdlib"]
    new_tokens = EXIT_PROMPTS["new_tokens"]
    hf_model = to_causal_lm(model)
    text = greedy(hf_model, prompts_from(stream, EXIT_PROMPTS["prompts"], EXIT_PROMPTS["prompt_tokens"]), new_tokens)
    windows = held_out_windows(stream, length, EXIT_PROMPTS["prompts"] * length)
    return {
        **EXIT_PROMPTS,
        "greedy": exit_agreement(hf_model, text, new_tokens, model.exit_depths),
        "greedy_repeated": repeated_share(text, new_tokens),
        "held_out_tokens": windows.shape[0] * length,
        "held_out": exit_agreement(hf_model, windows, length, model.exit_depths),
    }


def report(line: dict[str, Any]) -> None:
    """Print a line of the log."""
    text = "step {step} · {tokens:,} tokens · loss {loss:.3f} · rate {rate:.2f} · {tokens_per_cpu_second} tokens/s"
    print(text.format(**line), flush=True)


def check_same_run(state: Path, run: dict[str, Any]) -> None:
    """Refuse to continue a run with another recipe; its length may change. Then note the run in its folder."""
    target = state / "run.json"
    if target.exists():
        before = json.loads(target.read_text())
        for one in (before, plain := json.loads(json.dumps(run))):
            one["recipe"].pop("schedule")
        if before != plain:
            raise typer.BadParameter(f"{state} holds another run: {before}; use another --state or the same options")
    state.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(run, indent=2))


def empty_model(base: Path, variant: Variant, compiled: bool) -> StackedLlama:
    """A model of `base`'s configuration. Raises ValueError where the variant is for another architecture."""
    model = stacked(load_config(base), torch.bfloat16, compiled)
    if (variant.loop_weight > 0) != (model.loops > 1):
        raise ValueError(f"variant {variant.name} does not train the {model.config.model_type} model in {base}")
    return model


def start_model(
    model: StackedLlama, warm_start: Path | None, warm_tokens: int | None, seed: int, ids: torch.Tensor
) -> dict[str, Any] | None:
    """Give the model its first weights; says where they come from (None: drawn at random). `ids` `[B, S]`: text to grow on."""
    if warm_start is None:
        model.initialize(seed)
        return None
    record = warm_start / "training.json"
    known: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {"tokens": warm_tokens}
    earlier = (known.get("warm_start") or {}).get("tokens") or 0
    source = {
        "name": warm_start.name,
        "variant": known.get("variant", warm_start.name.split("-")[0]),
        "tokens": None if known["tokens"] is None else known["tokens"] + earlier,
    }
    start = load_stacked(warm_start, torch.bfloat16, compiled=False)
    if isinstance(model, StackedOuro) and start.loops == 1:
        model.grow_from(start, ids)
    else:
        model.load_state_dict(start.state_dict())
    return source


def publish(trainer: Trainer, base: Path, warm_start: dict[str, Any] | None, out: Path) -> None:
    """Evaluate the trainer's model and write its folder."""
    recipe, model = trainer.recipe, trainer.model
    console.print("evaluating …")
    record = {
        "variant": recipe.variant.name,
        "steps": trainer.progress.step,
        "tokens": trainer.progress.step * recipe.tokens_per_step,
        "warm_start": warm_start,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "cpu_minutes": round(trainer.progress.cpu_seconds / 60, 1),
        **environment(),
        "recipe": asdict(recipe),
        **measure(model, trainer.corpus, recipe.length),
    }
    write_model_folder(model, base, record, out)
    losses = {name: held_out["loss"] for name, held_out in record["held_out"].items()}
    console.print(f"wrote {out}: held-out loss {losses}, exit agreement {record['exits']['greedy']}")


@app.command()
def train(
    variant: Annotated[str, typer.Argument(help="stock, layerskip or looped")],
    out: Annotated[Path, typer.Option(help="folder of the finished model")],
    state: Annotated[Path, typer.Option(help="folder of the run's state, outside the repository")],
    base: Annotated[
        Path | None, typer.Option(help="folder with config.json and the tokenizer; default: the demo model's")
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(help="start from this folder's weights; a looped model grows from a Llama's first layers")
    ] = None,
    warm_start_tokens: Annotated[int | None, typer.Option(help="tokens they had seen, if not recorded")] = None,
    tokens: Annotated[int, typer.Option(help="tokens to train on, the decay included")] = 20_000_000,
    decay_tokens: Annotated[int, typer.Option(help="tokens of the decay")] = 4_000_000,
    batch: Annotated[int, typer.Option(help="sequences per step")] = Recipe.batch,
    length: Annotated[int, typer.Option(help="tokens per sequence")] = Recipe.length,
    matrix_lr: Annotated[float, typer.Option(help="peak Muon rate")] = Recipe.matrix_lr,
    vector_lr: Annotated[float, typer.Option(help="peak AdamW rate")] = Recipe.vector_lr,
    resume_from: Annotated[str, typer.Option(help="latest.pt, or stable.pt to extend a decayed run")] = "latest.pt",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = default_device(),
    threads: Annotated[int, typer.Option(help="CPU threads, 0 for torch's choice")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="fuse layers; needs a C++ compiler")] = True,
    cache: Annotated[Path | None, typer.Option(help="folder of the encoded corpus; default: the state's")] = None,
    seed: Annotated[int, typer.Option(help="of weights, order and draws")] = Recipe.seed,
) -> None:
    """Train a variant and write its model folder; continues a run whose state is there."""
    if variant not in VARIANTS:
        raise typer.BadParameter(f"unknown variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    set_up(threads)
    base = base or DEMO_MODEL / variant
    per_step = batch * length
    try:
        schedule = Schedule(total=tokens // per_step, warmup=100, decay=decay_tokens // per_step)
        recipe = Recipe(VARIANTS[variant], schedule, batch, length, matrix_lr=matrix_lr, vector_lr=vector_lr, seed=seed)
        model = empty_model(base, recipe.variant, compiled)
        corpus = Corpus.cached(base / "tokenizer.json", cache or state)
        ids = torch.from_numpy(training_batch(corpus, 0, batch, length, recipe.stdlib_share, seed))
        source = start_model(model, warm_start, warm_start_tokens, seed, ids)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    check_same_run(state, {"recipe": asdict(recipe), "warm_start": source})
    trainer = Trainer(model.to(device), corpus, recipe, state)
    if trainer.resume(resume_from):
        console.print(f"resumed at step {trainer.progress.step}")
    if not trainer.run(report):
        console.print(f"stopped at step {trainer.progress.step}; the same command continues")
        raise typer.Exit(0)
    publish(trainer, base, source, out)


if __name__ == "__main__":
    app()
