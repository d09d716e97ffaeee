"""``tide-serve``: serve a bundle over HTTP."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.cli.errors import run_app, stderr
from tide_runtime.cli.exported_model import (
    MAX_SEQ_LEN_HELP,
    MODEL_HELP,
    VERBOSE_HELP,
    WEIGHTS_HELP,
    bundle_of,
    is_model,
    load_engine,
)
from tide_runtime.cli.exporter_process import Verifications
from tide_runtime.cli.form import APP, COMMAND, with_options
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import ParamsError

from tide_serve.config import KEYS_VARIABLE, ServeConfig, api_keys, short_keys

if TYPE_CHECKING:
    from tide_serve.api.service import Service
    from tide_serve.models.registry import ModelRegistry
    from tide_serve.observe.request_record import RequestObserver

app = typer.Typer(**APP)
_ENGINE = EngineOptions()
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_network = partial(typer.Option, rich_help_panel="Network")
_safety = partial(typer.Option, rich_help_panel="Safety")
_engine = partial(typer.Option, rich_help_panel="Engine")
_several = partial(typer.Option, rich_help_panel="Several models")
_watching = partial(typer.Option, rich_help_panel="Watching it")


@app.command(**COMMAND)
@with_options(
    models="page",
    memory="page",
    idle_unload="page",
    export="page",
    api_key_file="cors_origins",
    api_key="cors_origins",
    log_format="otel",
    log_text="otel",
)
def serve(
    model: Annotated[
        str | None, typer.Argument(help=f"{MODEL_HELP} Or a folder of bundles, each served under its name.", show_default=False)
    ] = None,
    *,
    host: Annotated[str, _network(help="Address to listen on. 0.0.0.0 takes connections from every network.")] = "127.0.0.1",
    port: Annotated[int, _network(min=0, max=65535, help="0: any free one.")] = 8000,
    config: ServeConfig,
    models: Annotated[
        list[str] | None, _several("--model", metavar="NAME=DIR", help="A bundle, and the name that requests give; repeatable.")
    ] = None,
    memory: Annotated[
        str | None,
        _several(help="Of all that are loaded at a time, such as 8GiB: weights and --kv-memory. Default: 3/4 of what is free."),
    ] = None,
    idle_unload: Annotated[
        float | None,
        _several(help="Seconds without a request after which a model is unloaded. Default: when another needs the room."),
    ] = None,
    export: Annotated[
        bool, _several("--export", help="Export .gguf files and model directories among them first, into the cache.")
    ] = False,
    api_key_file: Annotated[
        Path | None,
        _safety(help=f"File with an API key a line; also: {KEYS_VARIABLE}, separated by commas. Default: no key is needed."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _safety(help="An API key; repeatable. Every user of this machine can see it in the list of processes."),
    ] = None,
    policy: Annotated[
        str, _engine(help="How deep tokens go: full, exact, exit or auto; see `tide-run --help`.")
    ] = _ENGINE.policy,
    max_batch: Annotated[int, _engine(help="Answers that are generated together; more wait.")] = _ENGINE.max_batch,
    max_queue: Annotated[int, _engine(help="Requests that may wait; more get 429.")] = _ENGINE.max_queue,
    kv_memory: Annotated[
        str | None,
        _engine(help="For keys and values and the prefix cache, such as 4G. Default: a quarter of what is free."),
    ] = None,
    prefix_cache: Annotated[
        bool, _engine(help="Keep keys and values of earlier texts. Clients can tell by the time of an answer what is in it.")
    ] = _ENGINE.prefix_cache,
    prefix_dir: Annotated[
        Path | None,
        _engine(
            help="Folder where they stay when memory is short, or for a restart; servers of a machine may share it. Who can "
            "read it can tell the texts."
        ),
    ] = None,
    prefix_disk: Annotated[str, _engine(help="Most that the folder takes.")] = f"{_ENGINE.prefix_disk >> 30}GiB",
    target: Annotated[str, _engine(help="Target of the bundle; auto: the best for this machine.")] = _ENGINE.target,
    device: Annotated[str, _engine(help="auto, cpu, cuda, or cuda:1 for the second GPU.")] = _ENGINE.device,
    threads: Annotated[int, _engine(help="Threads of ONNX Runtime; 0: one per core.")] = _ENGINE.threads.count,
    bits: Annotated[
        str, _engine(help="same: an answer never depends on those that run beside it (CPU); fast: it may, in less time.")
    ] = _ENGINE.bits,
    verify: Annotated[bool, _engine(help="Compare the bundle's files with their SHA-256 first.")] = _ENGINE.verify,
    weights: Annotated[str | None, _engine(help=WEIGHTS_HELP)] = None,
    max_seq_len: Annotated[int | None, _engine(min=1, help=MAX_SEQ_LEN_HELP)] = None,
    verbose: Annotated[bool, _engine("--verbose", help=VERBOSE_HELP)] = False,
    lora: Annotated[
        list[str] | None,
        _engine(
            metavar="NAME=DIR", help="A LoRA adapter in PEFT's format, which requests choose as the `model` NAME; repeatable."
        ),
    ] = None,
    otel: Annotated[
        bool,
        _watching("--otel", help="Send traces to OTEL_EXPORTER_OTLP_ENDPOINT (needs the extra tracing)."),
    ] = False,
) -> None:
    """Serve a bundle or a model over HTTP to clients of OpenAI's API.

    Example: `tide-serve engine/` or `tide-serve model.gguf` or `tide-serve engines/` (several bundles), then

        curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
          -d '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}'

    On a network: `TIDE_API_KEYS=… tide-serve engine/ --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem`

    /health, /ready and /metrics are for what watches the server; each request is a line on stderr. A socket that systemd
    hands over takes the place of --host and --port.
    """
    options = dict(locals())
    from tide_serve.http.server import bound_socket, inherited_socket, is_loopback, tls_context
    from tide_serve.models.named import make_pool, model_name_of, named_paths

    config = replace(config, api_keys=api_keys(api_key_file, api_key or ()))
    engine_options = EngineOptions(
        **{one.name: options[one.name] for one in fields(EngineOptions) if one.name in options}
        | {
            "kv_memory": None if kv_memory is None else _bytes("kv_memory", kv_memory),
            "prefix_disk": _bytes("prefix_disk", prefix_disk),
            "threads": ThreadOptions(threads, shared=True),  # this process runs only TIDE, so all sessions share one thread pool
            "adapters": named_paths(lora or (), "adapter"),
        }
    )
    several = _models_of(model, models or (), config)
    alone = not several and (memory is not None or idle_unload is not None)
    if alone:
        several = {(config.model_names or (model_name_of(str(model)),))[0]: str(model)}
    if several and (weights is not None or max_seq_len is not None):
        _check_exports(several, "--weights" if weights is not None else "--max-seq-len", export or alone)
    if several and lora:
        raise ParamsError("--lora is for a single model, without --memory or --idle-unload; serve it so, or merge the adapter")
    tls = tls_context(config)
    with inherited_socket() or bound_socket(host, port) as listener, Verifications() as verifications:
        loopback = is_loopback(listener)
        if loopback and config.allowed_hosts is None:
            config = replace(config, allowed_hosts=())
        _warn(config, loopback, bool(api_key))
        bundle = partial(bundle_of, weights=weights, max_seq_len=max_seq_len, verbose=verbose, verifications=verifications)
        load: Callable[[], ModelRegistry]  # from here on: what is wrong with the command is said before
        if several:
            size = None if memory is None else _bytes("memory", memory)
            exporter = bundle if export or alone else None
            load = partial(make_pool, several, engine_options, size, idle_unload, exporter)
        else:
            config = replace(config, model_names=config.model_names or (model_name_of(str(model)),))
            load = partial(_one_engine, bundle(str(model)), engine_options, config)
        _run(load, config, listener, tls, otel, verifications)


def _models_of(model: str | None, models: Sequence[str], config: ServeConfig) -> dict[str, str]:
    """Name → path of several models; none: ``model`` is the only one. Raises ParamsError where options contradict each other."""
    from tide_serve.models.named import models_in, named_paths

    if (model is None) != bool(models):
        raise ParamsError("give either a model or a folder of bundles, or models as --model NAME=DIR")
    several = named_paths(models) or models_in(Path(str(model)))
    if several and config.model_names:
        raise ParamsError("--model-name is for a single model; name several with --model NAME=DIR, or by their folders")
    return several


def _check_exports(models: Mapping[str, str], option: str, export: bool) -> None:
    """Raise ParamsError where none of ``models``, name → path, is exported, which ``option`` is for."""
    if not export:
        raise ParamsError(f"{option} is for models that are exported; add --export, or leave it out")
    if not any(map(is_model, models.values())):
        raise ParamsError(f"{option} is for models that are exported, and none of these is; leave it out")


def _run(
    load: Callable[[], ModelRegistry],
    config: ServeConfig,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    otel: bool,
    verifications: Verifications,
) -> None:
    """Serve what ``load`` gives until a signal ends the server."""
    from tide_serve.api.app import make_app
    from tide_serve.http.middlewares import guard
    from tide_serve.http.server import run_server, url_of
    from tide_serve.observe.logs import log_to_stderr

    observer = _tracing_observer() if otel else None  # before the engine: the extra may be missing
    log_to_stderr(config.log_text, config.log_format)
    models = load()
    verifications.end_process_on_failure()
    app = make_app(models, config)
    service: Service = app.state.service
    service.observer = observer or service.observer
    announce = partial(_announce, service, url_of(listener, tls is not None))
    try:
        run_server(guard(app, service), service, listener, tls, announce)
    finally:
        service.observer.close()


def _one_engine(bundle: Path, options: EngineOptions, config: ServeConfig) -> ModelRegistry:
    from tide_serve.models.registry import OneEngine

    engine = load_engine(bundle, options)
    if engine.backend.private_weights:
        _print_warning(f"the weights are packed in this process's own memory: {engine.backend.private_weights}")
    return OneEngine(engine, config.model_names)


def _tracing_observer() -> RequestObserver:
    """Raises ParamsError without the extra."""
    try:
        from tide_serve.observe.telemetry import TracingObserver

        return TracingObserver.over_otlp()
    except ImportError as error:
        raise ParamsError(f"--otel needs OpenTelemetry ({error}); pip install 'tide-llm[tracing]'") from error


def _warn(config: ServeConfig, loopback: bool, keys_in_command: bool) -> None:
    """Say on stderr what makes this server less safe than it could be."""
    warnings = []
    if keys_in_command:
        warnings.append(
            f"every user of this machine can see --api-key in the list of processes; use --api-key-file or {KEYS_VARIABLE}"
        )
    if short := short_keys(config.api_keys):
        warnings.append(f"{short} of {len(config.api_keys)} API keys can be guessed; `openssl rand -hex 24` makes a long one")
    if not loopback and not config.api_keys:
        warnings.append("every client that reaches this address can use the model; add --api-key-file")
    if not loopback and config.tls_certificate is None:
        warnings.append("keys and texts cross the network unencrypted; add --tls-certificate and --tls-key, or a TLS proxy")
    if config.log_text:
        warnings.append("prompts and answers are written into the log")
    for warning in warnings:
        _print_warning(warning)


def _print_warning(text: str) -> None:
    console = stderr()
    console.print("warning: ", style="yellow", end="")
    console.print(text)


def _announce(service: Service, url: str) -> None:
    """Say on stdout where the server listens, and how to try it."""
    config, models = service.config, service.models
    name = next(name for name in service.model_names if "error" not in models.described(name))
    lines = [f"{url} serves {models.summary()}"]
    chat = models.chats(name)
    path = "chat/completions" if chat else "completions"
    text: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    body = json.dumps({"model": name, **text})
    lines.append(f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'")
    if config.page:
        lines.append(f"  or open {url}/ in a browser")
    print(*lines, sep="\n", flush=True)


def _bytes(name: str, text: str) -> int:
    """A number of bytes such as ``4G`` or ``512M``. Raises ParamsError."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ParamsError(f"{name} is {text!r}; set it to a number of bytes such as 4G or 512M")
    return int(match[1]) * _UNITS[match[2].upper()]


def main() -> None:
    """Entry point of ``tide-serve``."""
    run_app(app, command="tide-serve", extra="serve")


if __name__ == "__main__":
    main()
