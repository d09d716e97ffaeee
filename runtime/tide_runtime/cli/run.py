"""``tide-run``: generate text from a bundle, streamed to the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.cli.conversation import KEYS, converse
from tide_runtime.cli.depth_view import html_view, terminal_view
from tide_runtime.cli.errors import run_app, stderr
from tide_runtime.cli.exported_model import MAX_SEQ_LEN_HELP, MODEL_HELP, VERBOSE_HELP, WEIGHTS_HELP, bundle_of, load_engine
from tide_runtime.cli.exporter_process import Verifications
from tide_runtime.cli.form import APP, COMMAND, with_options
from tide_runtime.cli.stats import print_stats
from tide_runtime.depth.options import DepthOptions
from tide_runtime.engine import Engine
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import PromptError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.outputs import Generation
from tide_runtime.sampler import TokenLogprob
from tide_runtime.text.tokenizer import Tokenizer

app = typer.Typer(**APP)
_PARAMS = GenerationParams()
_ENGINE = EngineOptions()
_LORA = "lora"  # name of the adapter in the engine
_sampling = partial(typer.Option, rich_help_panel="Text and sampling")
_chat = partial(typer.Option, rich_help_panel="Chat")
_output = partial(typer.Option, rich_help_panel="Output")
_depth = partial(typer.Option, rich_help_panel="Depth")
_engine = partial(typer.Option, rich_help_panel="Engine")
_export = partial(typer.Option, rich_help_panel="Export of a model that is no bundle yet")
_MODELS = "Default: the model's own."


@app.command(**COMMAND)
@with_options()
def run(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-`, or none with a pipe on stdin, reads it from there.")
    ] = None,
    *,
    max_new_tokens: Annotated[int, _sampling(help="Tokens to generate at most.")] = _PARAMS.max_new_tokens,
    temperature: Annotated[float | None, _sampling(help=f"0 takes the likeliest token always. {_MODELS}")] = None,
    top_k: Annotated[int | None, _sampling(help=f"Sample among the k likeliest tokens; 0 is off. {_MODELS}")] = None,
    top_p: Annotated[
        float | None, _sampling(help=f"Sample among the fewest tokens with this probability; 1 is off. {_MODELS}")
    ] = None,
    min_p: Annotated[
        float | None, _sampling(help=f"Drop tokens less likely than this times the likeliest; 0 is off. {_MODELS}")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling(help=f"Above 1, tokens seen before become less likely; 1 is off. {_MODELS}")
    ] = None,
    seed: Annotated[int | None, _sampling(help="Makes sampling reproducible. Default: another one each time.")] = None,
    stop: Annotated[list[str] | None, _sampling(help="Text that ends the output, not shown; repeatable. Default: none.")] = None,
    logprobs: Annotated[
        int, _output(help="Report log-probabilities of this many likeliest tokens too; needs --json.")
    ] = _PARAMS.logprobs,
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Generate past end-of-sequence tokens.")] = False,
    chat: Annotated[
        bool, _chat("--chat", help="The prompt is a user's message; without one on a terminal: --interactive.")
    ] = False,
    interactive: Annotated[
        bool,
        _chat(
            "--interactive",
            "-i",
            help=f"Chat on the terminal, turn by turn; earlier turns are not computed again (prefix cache). {KEYS}",
        ),
    ] = False,
    system: Annotated[str | None, _chat(help="System message of the chat. Default: none.")] = None,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object at the end instead of text.")] = False,
    policy: Annotated[
        str,
        _depth(
            help="How deep tokens go: full (every layer), exact (early drafts, verified: the same output), exit (certified early "
            "exits), auto (what the calibration recommends)."
        ),
    ] = _ENGINE.policy,
    depth: DepthOptions,
    depth_budget: Annotated[
        float | None,
        _depth(help="Layers that exit may take a token on average; over it tokens stop at the first exit, unsure or not."),
    ] = None,
    stats: Annotated[
        bool, _output("--stats", help="Tables of depth, drafts and launches on stderr; of a chat a line an answer.")
    ] = False,
    show_depth: Annotated[
        bool, _output("--show-depth", help="Print the text at the end, coloured by the layers run for each token.")
    ] = False,
    depth_html: Annotated[Path | None, _output(help="Write the coloured text to this HTML file as well.")] = None,
    target: Annotated[str, _engine(help="Target of the bundle; auto: the best for this machine.")] = (_ENGINE.target),
    device: Annotated[str, _engine(help="auto, cpu, cuda, or cuda:1 for the second GPU.")] = _ENGINE.device,
    threads: Annotated[int, _engine(help="Threads of ONNX Runtime; 0: one per core.")] = _ENGINE.threads.count,
    bits: Annotated[
        str, _engine(help="same: a text never depends on what shares its launches (CPU); fast: it may, in less time.")
    ] = _ENGINE.bits,
    verify: Annotated[bool, _engine(help="Compare the bundle's files with their SHA-256 first.")] = _ENGINE.verify,
    prefix_dir: Annotated[
        Path | None,
        _engine(help="Folder that keeps what a text begins with, so that a later call does not compute it again; 4 GiB."),
    ] = None,
    weights: Annotated[str | None, _export(help=WEIGHTS_HELP)] = None,
    verbose: Annotated[bool, _export("--verbose", help=VERBOSE_HELP)] = False,
    max_seq_len: Annotated[int | None, _export(min=1, help=MAX_SEQ_LEN_HELP)] = None,
    lora: Annotated[Path | None, _engine(help="Folder of a LoRA adapter in PEFT's format to write the text with.")] = None,
) -> None:
    """Generate text from a bundle or a model. Text streams to stdout; speed and depth follow on stderr.

    Example: `tide-run model.gguf "Why is the sky blue?" --chat`, or `tide-run engine/ "def main():" --max-new-tokens 64`.

    A model that is no bundle yet is exported first, into `$TIDE_CACHE_DIR/bundles` or `~/.cache/tide/bundles`, where later calls
    find it. Bundles there take at most `$TIDE_CACHE_GIB` (20) GiB together; those not used for longest are deleted.
    """
    interactive |= chat and prompt is None and not as_json and sys.stdin.isatty()
    if interactive and (prompt is not None or as_json):
        raise typer.BadParameter(
            "messages are read from the terminal; leave out the prompt and --json", param_hint="--interactive"
        )
    if system is not None and not (chat or interactive):
        raise typer.BadParameter("a system message belongs to a chat; add --chat or --interactive", param_hint="--system")
    if logprobs and not as_json:
        raise typer.BadParameter("log-probabilities are part of the JSON output; add --json", param_hint="--logprobs")
    if depth_html is not None and not depth_html.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {depth_html.parent}; make it first", param_hint="--depth-html")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a Latin-1 terminal prints ? for 漢 instead of failing
    text = None if interactive else _read_prompt(prompt)
    # This process runs only TIDE, so all sessions share one thread pool.
    options = EngineOptions(
        target=target,
        device=device,
        policy=policy,
        depth=depth,
        threads=ThreadOptions(threads, shared=True),
        verify=verify,
        bits=bits,
        prefix_dir=prefix_dir,
        max_batch=1,
        adapters={_LORA: lora} if lora is not None else {},
    )
    given = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    with (
        Verifications() as verifications,
        load_engine(bundle_of(model, weights, max_seq_len, verbose=verbose, verifications=verifications), options) as engine,
    ):
        params = engine.default_params(
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=tuple(stop or ()),
            logprobs=logprobs,
            ignore_eos=ignore_eos,
            depth_budget=depth_budget,
            adapter=_LORA if lora is not None else None,
            **{name: value for name, value in given.items() if value is not None},
        )
        opening = [{"role": "system", "content": system}] if system is not None else []
        if text is None:
            converse(engine, opening, partial(_answer, engine, params, stats), _note)
            _finish(verifications)
            return
        ids = engine.chat_prompt([*opening, {"role": "user", "content": text}]) if chat else text
        if as_json:
            generation = engine.generate(ids, params)[0]
            print(json.dumps(_as_json(engine, generation), ensure_ascii=False), flush=True)
        else:
            generation = engine.generate(ids, params)[0] if show_depth else _stream(engine, ids, params)
            if show_depth:
                Console(highlight=False, soft_wrap=True).print(terminal_view(generation, engine.tokenizer, engine.depth))
            _report(engine.manifest, generation)
        if stats:
            print_stats(engine, generation)
        if depth_html is not None:
            depth_html.write_text(html_view(generation, engine.tokenizer, engine.depth), encoding="utf-8")
        _finish(verifications)


def _finish(verifications: Verifications) -> None:
    if verifications.running:
        _note("compares the new bundle with its model; Ctrl-C deletes it")
    verifications.finish()


def _read_prompt(prompt: str | None) -> str:
    """The prompt from the argument or stdin."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise PromptError('no prompt given; add one in quotes, such as "def main():", pipe it into stdin, or add --interactive')
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # some locales decode invalid bytes with surrogateescape
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt on stdin is not {error.encoding} text ({error}); convert it") from error


def _answer(engine: Engine, params: GenerationParams, stats: bool, prompt: Sequence[int]) -> Generation:
    """An answer of a chat on the terminal."""
    generation = _stream(engine, prompt, params, stoppable=True)
    if stats:
        _report(engine.manifest, generation)
    return generation


def _stream(engine: Engine, prompt: str | Sequence[int], params: GenerationParams, stoppable: bool = False) -> Generation:
    """Print the text while it is generated, or token ids when the bundle has no tokenizer.

    Args:
        stoppable: Ctrl-C ends the text, and not the program.
    """
    handle = engine.submit(prompt, params)
    printed = ""
    try:
        for chunk in handle:
            text = chunk.text if engine.tokenizer is not None else f"{chunk.token_id} "
            printed += text
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not stoppable:
            raise
        handle.cancel()
        print((handle.result().text or "").removeprefix(printed), end="")  # what was final by then
    print(flush=True)
    return handle.result()


def _report(manifest: Manifest, generation: Generation) -> None:
    stats = generation.stats
    layers = manifest.model.num_layers
    depth = f"{stats.layers_per_token:.1f} of {layers} layers per token" if stats.new_tokens > 1 else "no decode step"
    parts = [
        f"prompt {stats.prompt_tokens} tokens" + (f" ({stats.prefix_tokens} cached)" if stats.prefix_tokens else ""),
        f"new {stats.new_tokens} tokens",
        f"first token {stats.time_to_first_token * 1e3:.0f} ms",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"depth {depth}",
        f"policy {stats.policy}",
        f"finish {generation.finish_reason}",
    ]
    _note(" · ".join(parts))


def _note(text: str) -> None:
    stderr().print(text, style="dim")


def _as_json(engine: Engine, generation: Generation) -> dict[str, Any]:
    stats = generation.stats
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "logprobs": [_logprob(engine.tokenizer, entry) for entry in generation.logprobs],
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "prefix_tokens": stats.prefix_tokens,
            "new_tokens": stats.new_tokens,
            "time_to_first_token_ms": stats.time_to_first_token * 1e3,
            "decode_time_ms": stats.decode_time * 1e3,
            "exit_time_ms": stats.exit_time * 1e3,
            "tokens_per_second": stats.tokens_per_second,
            "layers_per_token": stats.layers_per_token,
            "num_layers": engine.manifest.model.num_layers,
            "policy": stats.policy,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "deep_passes": stats.deep_passes,
            "tokens_by_depth": stats.depths(engine.depth),
            "forced": stats.forced,
            "speedup": stats.speedup,
            "predicted_speedup": stats.predicted_speedup,
            "uncovered": stats.uncovered,
            "launches": dict(engine.backend.launches),
        },
    }


def _logprob(tokenizer: Tokenizer | None, entry: TokenLogprob) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        return {"id": token, "text": text, "logprob": logprob}

    return {**one(entry.token, entry.logprob), "top": [one(*pair) for pair in entry.top]}


def main() -> None:
    """Entry point of ``tide-run``."""
    run_app(app)


if __name__ == "__main__":
    main()
