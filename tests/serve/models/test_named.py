"""Which models a command line names, and what is refused before the server starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tide_runtime import EngineOptions, ThreadOptions
from tide_runtime.errors import ParamsError
from tide_serve.models.named import make_pool, models_in, named_paths

OPTIONS = EngineOptions(max_batch=4, threads=ThreadOptions(1))


@pytest.fixture(scope="module")
def engines(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a bundle, a damaged one, a model, and files that are none."""
    folder = tmp_path_factory.mktemp("engines")
    shutil.copytree(bundle, folder / "good")
    shutil.copytree(bundle, folder / "broken")
    (folder / "broken" / "manifest.json").write_text("{")
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "README.md").touch()
    (folder / "empty").mkdir()
    return folder


def test_a_folder_of_bundles(engines: Path, bundle: Path) -> None:
    """Breaks: `tide-serve engines/` misses a model; or a bundle is taken for a folder of some."""
    assert models_in(engines) == {name: str(engines / file) for name, file in NAMES.items()}
    assert models_in(bundle) == models_in(engines / "nothing") == {}


NAMES = {"broken": "broken", "good": "good", "model": "model.gguf"}


def test_two_models_of_a_name_are_refused(engines: Path, bundle: Path, tmp_path: Path) -> None:
    """Breaks: one of them is never served, and nobody is told."""
    shutil.copytree(bundle, tmp_path / "a")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ParamsError, match="two models of the name a"):
        models_in(tmp_path)
    with pytest.raises(ParamsError, match="name a"):
        named_paths(["a=x", "a=y"])


@pytest.mark.parametrize("text", ["engine", "=engine", "name="])
def test_a_name_without_a_path(text: str) -> None:
    """Breaks: a mistyped --model serves something else."""
    with pytest.raises(ParamsError, match="NAME=DIR"):
        named_paths([text])


def test_models_are_exported_only_where_that_is_allowed(engines: Path, bundle: Path) -> None:
    """Breaks: a server spends an hour on an export that nobody asked for, or the user is not told how to ask."""
    model = {"model": str(engines / "model.gguf")}
    with pytest.raises(ParamsError, match=r"add --export, or make one: tide-export .*model\.gguf --out DIR"):
        make_pool(model, OPTIONS, 2**30)
    asked: list[str] = []
    export: Callable[[str], Path] = lambda path: asked.append(path) or bundle  # type: ignore[func-returns-value]  # noqa: E731
    assert make_pool(model, OPTIONS, 2**30, export=export).described("model")["max_model_len"] == 512
    assert asked == [model["model"]]


def test_a_broken_bundle_does_not_stop_the_others(engines: Path) -> None:
    """Breaks: a server does not start because one of its bundles is damaged; or starts with nothing to serve."""
    both = {name: str(engines / name) for name in ("good", "broken")}
    assert "error" in make_pool(both, OPTIONS, 2**30).described("broken")
    with pytest.raises(ParamsError, match="model broken cannot be loaded"):
        make_pool({"broken": both["broken"]}, OPTIONS, 2**30)


def test_what_can_never_fit_is_refused_by_name(engines: Path) -> None:
    """Breaks: a server starts, and every request for the model fails."""
    models = {"good": str(engines / "good")}
    with pytest.raises(ParamsError, match=r"model good can never be loaded: it takes .* and the limit is .*raise --memory"):
        make_pool(models, OPTIONS, 2**18)
    with pytest.raises(ParamsError, match="model good can never be loaded: kv_memory"):
        make_pool(models, EngineOptions(kv_memory=1000), 2**30)
    with pytest.raises(ParamsError, match="there is no /nowhere"):
        make_pool({"good": "/nowhere"}, OPTIONS, 2**30)


def test_the_budget_for_keys_and_values_follows_the_memory(engines: Path) -> None:
    """Breaks: models take more than a part of the memory, so that no two of them fit; or less than one text needs."""
    models = {"good": str(engines / "good")}
    sizes = [int(make_pool(models, OPTIONS, memory).described("good")["bytes"]) for memory in (2**26, 2**25, 2**24)]
    assert sizes == sorted(sizes, reverse=True) and all(size < 2**24 for size in sizes[2:])
    fixed = int(make_pool(models, EngineOptions(max_batch=4, kv_memory=2**21), 2**30).described("good")["bytes"])
    assert fixed - 2**21 < sizes[-1]
