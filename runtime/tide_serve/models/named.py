"""The models that a command line names: bundles in a folder or by name, and models that are exported first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tide_runtime import EngineOptions
from tide_runtime.bundle.manifest import MANIFEST_NAME
from tide_runtime.cli.exported_model import is_model
from tide_runtime.errors import DeviceMemoryError, ParamsError, TideError
from tide_runtime.scheduling.budgets import free_memory

from tide_serve.models.pool import ModelPool, PooledModel
from tide_serve.models.source import BundleSource

_FREE_MEMORY_SHARE = 0.75  # share of the memory that is free when the server starts


def model_name_of(model: str) -> str:
    """The name that a model is served by: that of its file, without .gguf, or of its folder; of a model on the hub its id."""
    path = Path(model).resolve()
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" and path.is_file() else path.name


def models_in(folder: Path) -> dict[str, str]:
    """Name → path of the bundles, model folders and GGUF files in ``folder``; none where it is itself a bundle or a model."""
    if not folder.is_dir() or (folder / MANIFEST_NAME).exists() or is_model(str(folder)):
        return {}
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not (path.suffix == ".gguf" or _is_bundle_or_model(path)):
            continue
        name = model_name_of(str(path))
        if name in found:
            raise ParamsError(f"{folder} has two models of the name {name}; rename one of {found[name]} and {path}")
        found[name] = str(path)
    return found


def _is_bundle_or_model(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST_NAME).exists() or is_model(str(path)))


def named_paths(given: Sequence[str], what: str = "model") -> dict[str, str]:
    """Name → path of ``given``, each NAME=PATH of ``what``. Raises ParamsError."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ParamsError(f"the {what} is {text!r}; write NAME=DIR, such as small=folder/small")
        if name in found:
            raise ParamsError(f"two {what}s have the name {name}; give each its own")
        found[name] = path
    return found


def make_pool(
    models: Mapping[str, str],
    options: EngineOptions,
    memory: int | None = None,
    idle_unload: float | None = None,
    export: Callable[[str], Path] | None = None,
) -> ModelPool:
    """A pool of ``models``, name → path, whose engines run as ``options`` say. Nothing is loaded yet.

    A broken bundle is in it, and its requests are answered with the reason until it is repaired.

    Args:
        memory: bytes for all that are loaded at a time; None: three quarters of what is free now.
        export: makes the bundle of a path that is none; None: such a path is refused.

    Raises ParamsError for a path that does not exist or needs an export, and for a model that can never fit, and what ``export``
    raises.
    """
    if idle_unload is not None and idle_unload <= 0:
        raise ParamsError(f"idle_unload is {idle_unload}; set it to seconds > 0, or leave it out")
    limit = memory if memory is not None else int(_FREE_MEMORY_SHARE * free_memory())
    pooled = [_pooled(name, BundleSource(_bundle(name, path, export), options, limit)) for name, path in models.items()]
    if all(model.failure is not None for model in pooled):
        raise ParamsError("; ".join(f"model {model.name} cannot be loaded: {model.failure}" for model in pooled))
    if memory is None and any(model.plan is not None and model.plan.on_device for model in pooled):
        raise ParamsError("the models share the memory of a device; say how much of it with --memory")
    return ModelPool(pooled, limit, idle_unload)


def _bundle(name: str, path: str, export: Callable[[str], Path] | None) -> Path:
    if is_model(path):
        if export is None:
            raise ParamsError(f"model {name}: {path} is no bundle yet; add --export, or make one: tide-export {path} --out DIR")
        return export(path)
    if not Path(path).exists():
        raise ParamsError(f"model {name}: there is no {path}; give a bundle's directory")
    return Path(path)


def _pooled(name: str, source: BundleSource) -> PooledModel:
    try:
        return PooledModel(name, source, source.sized())
    except (DeviceMemoryError, ParamsError) as error:
        raise ParamsError(f"model {name} can never be loaded: {error}; raise --memory, or leave the model out") from error
    except TideError as error:
        return PooledModel(name, source, failure=str(error))
