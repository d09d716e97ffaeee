"""One run of a comparison: the arms, their prompts, and what is measured of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_runtime import TideError
from tide_runtime.bundle import Bundle
from tide_runtime.errors import ParamsError
from tide_runtime.text.tokenizer import Tokenizer

from tide_bench.arm_folders import ArmFolders
from tide_bench.arm_pool import ArmPool, with_options
from tide_bench.arms import CUDA, OTHER_ARMS, POLICIES, ArmSpec, in_bits, on_target, title_on
from tide_bench.comparison import Comparison, Place
from tide_bench.config import BenchConfig
from tide_bench.counters import free_gpu_bytes
from tide_bench.device_choice import BenchDevice
from tide_bench.prompts import joined, read_prompts, windows
from tide_bench.report import Phases
from tide_bench.source_model import SourceModel, find_source

_PROCESS_SHARE = 2.2  # memory of an arm over its fp32 weights: runtimes keep them packed for their kernels as well
_GPU_SHARE = 1.5  # GPU memory of an arm over its weights: caches and workspaces
_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}


class Bench:
    """One run of the command: what it needs, opened and closed together."""

    def __init__(
        self,
        bundle: Bundle,
        config: BenchConfig,
        device: BenchDevice,
        model: str | None,
        prompts: Path | None,
        cache: Path,
        long: bool,
        phases: Phases,
        gguf: Path | None = None,
    ) -> None:
        self.manifest = bundle.manifest
        self.config = config
        self._device = device
        info = bundle.manifest.tokenizer
        tokenizer = Tokenizer.from_file(bundle.path(info.file)) if info is not None else None
        self._prompts = read_prompts(prompts, tokenizer)
        self._lengths = _lengths(config, bundle.manifest.max_seq_len, long)
        self._phases = phases
        with phases("find the HuggingFace model"):
            source = _source(bundle, config, model)
        best = device.targets[0]
        folders = ArmFolders(bundle.directory, bundle.manifest, source, cache, gguf, best)
        self.pool = ArmPool(folders, phases, device.of_arms)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def rows(self) -> list[dict[str, Any]]:
        """What the mode measures, a row for each arm and place."""
        places = [
            Place(length, batch, _groups(self._windows(length, batch * self.config.rounds), batch))
            for length in self._lengths
            for batch in sorted(self.config.batches)
        ]
        compared = Comparison(self.pool, self._specs(), places, self.manifest, self.config, self._phases)
        return compared.run(self._most_in_memory())

    def _specs(self) -> list[ArmSpec]:
        best, *further = self._device.targets
        ours = [in_bits(POLICIES[name], self.config.bits) for name in dict.fromkeys(("full", *self.config.policies))]
        wanted = {one.name: replace(one, title=title_on(one, best)) if further else one for one in ours}
        wanted |= {one.name: one for target in further for one in (on_target(own, target) for own in ours)}
        wanted |= {name: OTHER_ARMS[name] for name in self.config.rivals}
        return list(with_options(wanted, self.manifest).values())

    def _windows(self, tokens: int, count: int) -> list[list[int]]:
        texts = self._prompts
        if all(len(text) < tokens for text in texts):
            texts = joined(texts, tokens)
        return windows(texts, tokens, count)

    def _most_in_memory(self) -> int:
        import psutil  # `tide-bench --help` works without it

        need = 4 * self.manifest.model.parameters * _PROCESS_SHARE + 2**29  # libraries and buffers: half a GiB
        most = psutil.virtual_memory().available / need
        if self._device.kind == CUDA:
            free = free_gpu_bytes(self._device.choice.ordinal) or 0
            need = _WIDTH[self._device.dtype] * self.manifest.model.parameters * _GPU_SHARE + 2**30  # a context and its libraries
            most = min(most, free / need)
        return max(2, int(most))


def _source(bundle: Bundle, config: BenchConfig, model: str | None) -> SourceModel | str:
    if not config.rivals:
        return "not needed"
    try:
        return find_source(bundle.manifest.model, model)
    except TideError as error:
        return str(error)


def _lengths(config: BenchConfig, slots: int, long: bool) -> list[int]:
    """Prompt lengths; raises ParamsError when one does not fit into the cache with its new tokens."""
    room = slots - config.new_tokens
    lengths = sorted({*config.prompt_tokens, *((slots // 2, room) if long else ())})
    if lengths[-1] > room or lengths[0] < 1:
        raise ParamsError(f"prompts of {lengths[-1]} tokens and {config.new_tokens} new ones do not fit into {slots} cache slots")
    return lengths


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]
