"""Python code that comes with a model: it runs with --trust-remote-code only, from files that are named and pinned.

transformers runs the classes that ``auto_map`` in config.json names, with all rights of the process: nothing here confines it. A
bundle holds none of it, so it runs at calibration and export and never where a bundle is served.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tide_runtime.errors import ParamsError, UnsupportedModelError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import get_tokenizer_config

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CLASSES = ("AutoConfig", "AutoModelForCausalLM")
_PACKAGE = "transformers_modules"  # package from which transformers imports a model's own code


def check_remote_code(source: str, revision: str | None, trusted: bool) -> None:
    """Raise the reason why the code of ``source``, a directory or hub id, must not or cannot run; nothing where none would.

    Raises:
        UnsupportedModelError: code would have to run and is not ``trusted``, or lies in another repository, whose revision no
            option pins.
        ParamsError: it is that of a hub id without the hash of a commit, so that other code may run the next time.
    """
    config, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    known = CONFIG_MAPPING[config["model_type"]].__module__ if config.get("model_type") in CONFIG_MAPPING else None
    is_own = known is not None and not known.startswith("transformers.")  # of `looped_models`, which transformers prefers
    named = _named(config, _CLASSES) if known is None or (trusted and not is_own) else set()
    if trusted:  # without, transformers refuses a tokenizer's
        named |= _named(get_tokenizer_config(source, revision=revision), ("AutoTokenizer",))
    if not named:
        return
    files = ", ".join(sorted({f"{name.rpartition('--')[2].partition('.')[0]}.py" for name in named}))
    elsewhere = sorted({name.partition("--")[0] for name in named if "--" in name} - {source})
    if elsewhere:
        raise UnsupportedModelError(
            f"{source} is loaded by the code of another repository, {', '.join(elsewhere)} ({files}), whose revision cannot be "
            "pinned; copy those files beside its config.json, name them in its auto_map, and read them"
        )
    is_local = Path(source).exists()
    if not trusted:
        folder = Path(source).resolve() if is_local else f"https://huggingface.co/{source}"
        raise UnsupportedModelError(
            f"{source} comes with code of its own, which has to run to load it: read {files} in {folder}, then add "
            "--trust-remote-code"
        )
    if not is_local and not _COMMIT.fullmatch(revision or ""):
        raise ParamsError(
            f"--trust-remote-code runs the code of {source}, which may change between two runs; add --revision with the hash of "
            "the commit that you have read, 40 hexadecimal digits"
        )


def _named(config: Mapping[str, Any], classes: Iterable[str]) -> set[str]:
    """What ``auto_map`` names for ``classes``, as module.Class; of a tokenizer it may name two classes, or one and None."""
    found = config.get("auto_map") or {}
    found = found if isinstance(found, Mapping) else {"AutoTokenizer": found}  # of older releases
    several = [found[name] if isinstance(found[name], list | tuple) else [found[name]] for name in classes if name in found]
    return {str(name) for names in several for name in names if name is not None}


def code_digests(model: PreTrainedModel) -> dict[str, str]:
    """File → SHA-256 of the code that came with ``model`` and was imported for it; empty for transformers' own classes."""
    packages = {kind.__module__.rpartition(".")[0] for kind in (type(model), type(model.config))}
    packages = {package for package in packages if package.startswith(f"{_PACKAGE}.")}
    modules: list[Any] = [sys.modules[name] for name in sys.modules if name.rpartition(".")[0] in packages]
    files = sorted({Path(module.__file__) for module in modules if module.__file__})
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.name != "__init__.py"}
