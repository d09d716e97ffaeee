"""The config and tensors of a drafter, and a module filled with all of them or none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tide_runtime.errors import ModelFilesError
from torch import Tensor, nn
from transformers.utils import cached_file

from tide_export.sources.accounting import TensorHeader, read_headers, weight_files


@dataclass(frozen=True)
class DrafterFolder:
    """Tensors by the names that ``named`` gives them; their values are read when they are asked for.

    Args:
        files: tensor → its file and its name there.
    """

    source: str
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    files: Mapping[str, tuple[Path, str]]

    @classmethod
    def read(cls, source: str, named: Callable[[str], str]) -> DrafterFolder:
        """Read headers and config.json of a folder or hub id.

        Raises ModelFilesError if there are none, or two tensors get one name.
        """
        try:
            path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
            files = weight_files(source, None)
        except OSError as error:
            raise ModelFilesError(f"cannot read the draft head {source}: {str(error).splitlines()[0]}") from error
        if path is None or not files:
            pickled = sorted(one.name for kind in ("*.bin", "*.pt") for one in Path(source).glob(kind))
            missing = "config.json" if path is None else "*.safetensors"
            advice = f" ({pickled[0]} can run code when it is loaded: save its tensors as model.safetensors)" if pickled else ""
            raise ModelFilesError(f"{source} is no draft head: it holds no {missing}{advice}")
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelFilesError(f"{path} is not JSON ({error}): download the head again") from error
        return cls._of(source, config, files, named)

    @classmethod
    def _of(cls, source: str, config: Mapping[str, Any], files: Iterable[Path], named: Callable[[str], str]) -> DrafterFolder:
        headers: dict[str, TensorHeader] = {}
        holders: dict[str, tuple[Path, str]] = {}
        for file in files:
            for stored, header in read_headers([file]).items():
                name = named(stored)
                if name in headers:
                    raise ModelFilesError(f"{source} holds {holders[name][1]} and {stored}, which are both {name}; delete one")
                headers[name], holders[name] = header, (file, stored)
        return cls(source, config, headers, holders)

    @property
    def names(self) -> Collection[str]:
        return self.headers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape

    def value(self, name: str) -> Tensor:
        file, stored = self.files[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(stored)

    def sha256(self) -> str:
        """Over the names, types, shapes and bytes of all tensors."""
        return digest({name: self.value(name) for name in self.names})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in name order."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        whole.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def fill(module: nn.Module, folder: DrafterFolder, not_read: Collection[str], known: Collection[str]) -> None:
    """Copy the folder's tensors into ``module``, which was made for them.

    Args:
        not_read: parameters and buffers that have other sources.
        known: tensors that are no parameters.

    Raises ModelFilesError with the names of missing, unknown and misshapen tensors, and of integers in the place of numbers.
    """
    wanted = {name: tensor for name, tensor in module.state_dict().items() if name not in not_read}
    missing = sorted(wanted.keys() - folder.names)
    unknown = sorted(name for name in folder.names if name not in wanted and name not in known and not _is_leftover(name))
    problems = [f"it lacks {some(missing)}"] * bool(missing) + [f"it has unknown {some(unknown)}"] * bool(unknown)
    for name in sorted(wanted.keys() & folder.names):
        if folder.shape(name) != tuple(wanted[name].shape):
            problems.append(f"{name} has shape {list(folder.shape(name))}, expected {list(wanted[name].shape)}")
        elif not folder.headers[name].dtype.startswith(("F", "BF")):
            problems.append(f"{name} holds {folder.headers[name].dtype}, expected floating-point numbers")
    if problems:
        raise ModelFilesError(
            f"the draft head {folder.source} cannot be read in full: {'; '.join(problems)}; download it again, or use a head of "
            "a known form"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(folder.value(name))


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


def _is_leftover(name: str) -> bool:
    """Whether a tensor is the rotary frequencies, which the config gives, and which older releases saved."""
    return name.endswith("rotary_emb.inv_freq")
