"""Models as they were downloaded, where a command takes a bundle: a GGUF file, a model directory, or a hub id.

`bundle_of` exports the model into the machine's cache, ``$TIDE_CACHE_DIR/bundles``, else ``~/.cache/tide/bundles``, and finds it
there the next time. The exporter runs as a process of its own: its memory and its ONNX Runtime sessions end with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.onnxruntime.packed_weights import packed_weights
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import MANIFEST_NAME, NOT_YET, SCHEMA_VERSION
from tide_runtime.cached_folders import CachedFolders
from tide_runtime.cli.errors import MODULES, stderr
from tide_runtime.cli.exporter_process import Verifications, run_exporter
from tide_runtime.engine import Engine
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import MissingExtraError, ModelFilesError, OutputError, ParamsError
from tide_runtime.machine_cache import cache_folder
from tide_runtime.targets.target_choice import DeviceChoice, choose_target

MODEL_HELP = (
    "A bundle's directory, as `tide-export --out` wrote it. Or a .gguf file, a model directory, a hub id such as org/name, which "
    "are exported into the cache once (see --weights, --max-seq-len)."
)
VERBOSE_HELP = "Show the figures of an export, and not only its phases."
WEIGHTS_HELP = (
    "Of a model that is no bundle yet: auto (the default: w8a8, products of integers, where they fit the memory), w8a8, source "
    "(as stored), int4, int8, fp32; see `tide-export --help`."
)
MAX_SEQ_LEN_HELP = (
    "Of a model that is no bundle yet: tokens that prompt and output have together, as `tide-export --max-seq-len`. Default: the "
    "model's own, at most 4096."
)
_TOOLS = ("tide-llm", "torch", "transformers", "gguf", "onnx-ir", "onnxscript", "onnxruntime")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FIRST_S, _FIRST_S_PER_GB = 25, 10  # seconds to a first answer on two cores, and per GB of 4-bit blocks (benchmarks.export_scale)
_SAMPLES, _SAMPLE, _ENDS = 64, 2**16, 2**23  # samples of a file's content, bytes of each, bytes of its beginning and end

# Exports a model with the arguments of `tide-export` while the file of the lock stays open; returns the exit code.
Exporter = Callable[[list[str], IO[bytes]], int]


@dataclass(frozen=True)
class _Model:
    """``identity``: changes with its content; ``arguments``: those of `tide-export` that name it; ``bytes``: 0 on the hub."""

    name: str
    identity: Sequence[object]
    arguments: list[str]
    bytes: int = 0


def bundle_of(
    model: str,
    weights: str | None = None,
    max_seq_len: int | None = None,
    export: Exporter | None = None,
    verbose: bool = False,
    verifications: Verifications | None = None,
) -> Path:
    """The directory of the bundle ``model``; for a model, that of its bundle in the cache, exported where there is none yet.

    Args:
        weights: as `tide-export --weights`; None: see `WEIGHTS_HELP`.
        max_seq_len: as `tide-export --max-seq-len`; None: see `MAX_SEQ_LEN_HELP`.
        verbose: show the export's figures too, and not only its phases.
        verifications: gets the exporter of a new bundle, which it then verifies while the bundle is used; None: it is verified.

    Raises:
        MissingExtraError: the exporter is not installed.
        ModelFilesError: a hub id cannot be resolved.
        OutputError: the cache cannot be written.
        ParamsError: ``weights`` or ``max_seq_len`` are given for a bundle.
        SystemExit: the export failed, and has said why; nothing of it stays.
    """
    if not is_model(model):
        if weights is not None:
            raise ParamsError(f"--weights is for models that are exported now, and {model} is a bundle; leave it out")
        if max_seq_len is not None:
            raise ParamsError(
                f"--max-seq-len is for models that are exported now, and {model} is a bundle, which has its length; leave it "
                "out, or export the model again"
            )
        return Path(model)
    found = _hub_model(model) if not Path(model).exists() and not model.endswith(".gguf") else _local_model(Path(model))
    options = ["--weights", weights or "auto"]
    if max_seq_len is not None:
        options += ["--max-seq-len", str(max_seq_len)]
    key = json.dumps([found.identity, options, SCHEMA_VERSION, [_version(tool) for tool in _TOOLS]])
    name = f"{found.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folders = CachedFolders(cache_folder("bundles"))
    console = stderr()
    with suppress(OSError):  # said below, where it is written
        if (kept := folders.find(name)) is not None and not (_never_verified(kept) and folders.discard(name)):
            console.print(f"bundle {kept}", style="dim")
            return kept
    _check_exporter(model)
    console.print(f"exports {model} once{_estimate(found.bytes)}; later calls find its bundle")
    export = export or partial(run_exporter, verbose=verbose, verifications=verifications)
    build = partial(_build, [*found.arguments, *options], export, console)
    try:
        made = folders.make(name, build, lambda: console.print(f"another process exports {model}; waiting for it"))
    except OSError as error:
        raise OutputError(
            f"the bundle of {model} cannot be kept in {folders.folder} ({error}); choose another folder with TIDE_CACHE_DIR, or "
            f"make a bundle with tide-export {model} --out DIR"
        ) from error
    assert made is not None  # it waits
    return made


def _never_verified(bundle: Path) -> bool:
    """Whether its exporter has not finished: it does so now, or was killed."""
    return f'"{NOT_YET}"' in (bundle / MANIFEST_NAME).read_text(encoding="utf-8")


def is_model(model: str) -> bool:
    """Whether ``model`` names a model and no bundle: a GGUF file, a directory with config.json, or a hub id."""
    path = Path(model)
    if path.is_dir():
        return not (path / MANIFEST_NAME).exists() and (path / "config.json").is_file()
    # A path in a folder that exists is a mistyped one, not the id of a model on the hub.
    return model.endswith(".gguf") or path.is_file() or (_HUB_ID.fullmatch(model) is not None and not path.parent.exists())


def load_engine(directory: Path, options: EngineOptions) -> Engine:
    """`Engine.load`, with a bar on the terminal while a large model's weights are packed, once on this machine."""
    bundle = Bundle.open(directory, verify=options.verify)
    target = options.target if options.target != "auto" else choose_target(bundle.manifest, DeviceChoice.parse(options.device))
    if target in bundle.manifest.targets and bundle.manifest.targets[target].backend == OnnxRuntimeBackend.name:
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=stderr(), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("pack the weights for this machine, once", visible=False)
            packed_weights(
                bundle,
                target,
                options.threads,
                lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            )
    return Engine(bundle, options)


def _build(arguments: list[str], export: Exporter, console: Console, path: Path, lock: IO[bytes]) -> None:
    console.print(f"  into {path}; to have it elsewhere: {shlex.join(['tide-export', *arguments, '--out', 'DIR'])}", style="dim")
    code = export([*arguments, "--out", str(path)], lock)
    if not path.is_dir():  # code 3: it is there, and lacks a target for a GPU
        raise SystemExit(code or 1)


def _estimate(size: int) -> str:
    """How long the first answer of ``size`` bytes takes; nothing for a model on the hub, whose size is not known yet."""
    seconds = _FIRST_S + _FIRST_S_PER_GB * size / 1e9
    return f" (first answer after about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'})" if size else ""


def _check_exporter(model: str) -> None:
    missing = sorted(name for name in MODULES["export"] if find_spec(name) is None)
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{model} is no bundle yet, and to export it needs {', '.join(missing)}, which {are} not installed: "
            "pip install 'tide-llm[export]'; a bundle that was exported elsewhere runs without"
        )


def _local_model(path: Path) -> _Model:
    """A file or directory, told from others without reading it whole: paths, sizes, times of change, sampled content.

    Raises ModelFilesError if it is missing, no GGUF file, or cannot be read.
    """
    if not path.exists():
        raise ModelFilesError(f"there is no file {path}; give a .gguf file, a model directory, a hub id or a bundle")
    inside = [*path.glob("*"), *path.glob("*/config.json")]  # those in folders are of an embedding model's modules
    files = [path] if path.is_file() else sorted(p for p in inside if p.is_file() and not p.name.startswith("."))
    try:
        identity = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns, _sampled_digest(p)] for p in files]
        if path.is_file():
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelFilesError(f"{path} is no GGUF file: it does not begin with GGUF; download it again")
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read ({error}); make its files readable") from error
    name = path.stem if path.is_file() else path.resolve().name
    return _Model(name, identity, [str(path)], sum(p.stat().st_size for p in files))


def _sampled_digest(path: Path) -> str:
    """SHA-256 of the first and last 8 MiB of a file, where its header lies, and of 64 samples between them."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for offset, length in [(0, _ENDS), *((size * i // _SAMPLES, _SAMPLE) for i in range(_SAMPLES)), (size - _ENDS, _ENDS)]:
            file.seek(max(0, offset))
            digest.update(file.read(length))
    return digest.hexdigest()


def _hub_model(model: str) -> _Model:
    """A model on the hub: the commit that its main branch has now, or without a network had when it was last seen."""
    from huggingface_hub import hf_hub_download  # comes with tokenizers
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # network, access, name: the library has a dozen classes
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, LocalEntryNotFoundError):  # one of the other class, too
            why = f"there is no folder {model} here, and the hub is not reached to look for one: {reason}"
        elif isinstance(error, EntryNotFoundError):
            why = (
                f"the repository {model} on the hub has no config.json; if it holds GGUF files, download one with "
                f"`hf download {model} FILE.gguf --local-dir .` and give its path"
            )
        else:
            why = f"there is no folder {model} here, and the hub gives no such model: {reason}"
        raise ModelFilesError(why) from error
    commit = config.parent.name
    return _Model(model.replace("/", "--"), [model, commit], [model, "--revision", commit])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
