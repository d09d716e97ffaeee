"""A model as every engine reads it: a GGUF file of 4 bits by its path, or random weights in the shape of Qwen2.5 1.5B. The same
in 8 bits is made by llama.cpp's `llama-quantize`, int4 by onnxruntime-genai's builder. No torch at import.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tide_bench.arms.genai import build_model_folder
from tide_bench.arms.llamacpp_native import NATIVE
from tide_bench.arms.process import ArmError
from tide_bench.build_cache import cached_folder, files_digest, run_in_process
from tide_bench.bundles import export_bundle
from tide_bench.source_model import huggingface_folder

from benchmarks.models.gguf_files import prose_windows
from benchmarks.models.random_gguf import Qwen2Shape, byte_vocabulary, write_random_gguf

QWEN = "qwen-1.5b"
QWEN_SHAPE = Qwen2Shape(28, 1536, 8960, 12, 2, 151936, True, "Q4_0")
SLOTS = 2304  # KV slots of TIDE's bundles: a prompt of 2,048 tokens and a reply


@dataclass(frozen=True)
class PeerFiles:
    """``file``: the GGUF file of 4 bits; ``identity`` changes with it; everything made of it is kept in ``folder``."""

    title: str
    file: Path
    identity: str
    folder: Path

    def of(self, process: str) -> Path:
        """What the process of an arm loads: ``tide-FORM``, ``llamacpp``, ``openvino``, each also with ``-q8``, ``genai-int4``.

        Raises ArmError or what its maker raises.
        """
        if process.startswith("tide-"):
            form = process.removeprefix("tide-")
            return export_bundle(self.file, self.identity, self.folder / f"bundle_{form}", max_seq_len=SLOTS, weights=form)
        if process == "genai-int4":
            return build_model_folder(self._weights(), self.identity, self.folder / process, "int4")
        return self._in_8_bits() if process.endswith("-q8") else self.file

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts [count][tokens]: prose, or random ids where weights are random."""
        if self.title == QWEN:
            return np.random.default_rng(tokens).integers(0, QWEN_SHAPE.vocab, (count, tokens)).tolist()
        return prose_windows(self._weights() / "tokenizer.json", count, tokens)

    def _weights(self) -> Path:
        return huggingface_folder(self.file, self.identity, self.folder / "weights")

    def _in_8_bits(self) -> Path:
        quantize = NATIVE.absolute().with_name("llama-quantize")
        if not quantize.is_file():
            raise ArmError("the file in 8 bits is made by llama-quantize, which is not there; make llamacpp-native")

        def make(empty: Path) -> None:
            command = [str(quantize), "--allow-requantize", str(self.file), str(empty / "q8_0.gguf"), "Q8_0"]
            subprocess.run(command, check=True, capture_output=True)

        return cached_folder(self.folder / "q8", f"{self.identity}\nQ8_0", make) / "q8_0.gguf"


def peer_files(model: str, cache: Path) -> PeerFiles:
    """The files of `QWEN`, or of a path of a GGUF file."""
    if model != QWEN:
        file = Path(model)
        return PeerFiles(file.name, file, files_digest([file]), cache / "peers" / file.stem)
    identity = f"{QWEN_SHAPE}, {files_digest([Path(__file__)])}"
    make: Callable[[Path], None] = lambda empty: run_in_process(_write_qwen, empty / "qwen.gguf")  # noqa: E731
    made = cached_folder(cache / "peers" / QWEN / "gguf", identity, make) / "qwen.gguf"
    return PeerFiles(QWEN, made, identity, cache / "peers" / QWEN)


def _write_qwen(file: Path) -> None:
    write_random_gguf(QWEN_SHAPE, file, byte_vocabulary)
