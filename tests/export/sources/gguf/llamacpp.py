"""llama.cpp as the reference of what a GGUF file means."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray


class LlamaCpp:
    """Its server in this process, with caches in fp32: rounding them to fp16 changes a log-probability by up to 1e-2."""

    def __init__(self, file: Path, context: int) -> None:
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start gdb
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup, params.fit_params = context, 1, 0, False, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_prompt, params.cache_ram_mib, params.cache_idle_slots = False, 0, False
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def log_probs(self, ids: list[int], vocab: int) -> NDArray[np.float64]:
        """Log-probabilities [V] of the token after ``ids``; NaN for those that it leaves out."""
        body = {"prompt": ids, "n_predict": 1, "temperature": 1.0, "samplers": [], "n_probs": vocab, "cache_prompt": False}
        for seed in range(50):
            answer = self._call("/completion", {**body, "seed": seed})
            if "completion_probabilities" in answer:  # missing where the token that it drew ends the text
                break
        found = np.full(vocab, np.nan)
        for choice in answer["completion_probabilities"][0]["top_logprobs"]:
            found[choice["id"]] = choice["logprob"]
        return found

    def ids(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``, special tokens in it included."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        return list(self._call("/tokenize", body)["tokens"])

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.load(answer)


class LlamaCppProcess:
    """It in a process of its own: for some files it aborts."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def log_probs(self, file: Path, context: int, ids: list[int], vocab: int) -> NDArray[np.float64] | None:
        """Those of `LlamaCpp`; None for a file that it does not read."""
        self._pool = self._pool or ProcessPoolExecutor(1, get_context("spawn"))
        try:
            return self._pool.submit(_log_probs, file, context, ids, vocab).result()
        except BrokenProcessPool:
            self._pool = None
            return None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _log_probs(file: Path, context: int, ids: list[int], vocab: int) -> NDArray[np.float64] | None:
    try:
        return LlamaCpp(file, context).log_probs(ids, vocab)
    except (RuntimeError, OSError):
        return None
