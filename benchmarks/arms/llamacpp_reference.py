"""llama.cpp as a reference: token ids and log-probabilities of a GGUF file, in fp32 as far as it computes so."""

from __future__ import annotations

import json
import os
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LlamacppReference:
    """The server of `xllamacpp` in this process. Caches are fp32, flash attention is off, one thread.

    Raises RuntimeError for a file that llama.cpp refuses.
    """

    def __init__(self, file: Path, slots: int = 256) -> None:
        import xllamacpp

        os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start gdb
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), slots, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_gpu_layers, params.fit_params, params.warmup, params.verbosity = 0, False, False, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)
        host, _, port = self._server.listening_address.removeprefix("http://").partition(":")
        self._connection = HTTPConnection(host, int(port))

    def __enter__(self) -> LlamacppReference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self._server = None

    def ids(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``, special tokens in it included."""
        return list(self._post("/tokenize", {"content": text, "add_special": add_special, "parse_special": True})["tokens"])

    def next_logprobs(self, ids: list[int], count: int) -> dict[int, float]:
        """Log-probabilities of the ``count`` likeliest tokens behind ``ids``."""
        whole = self.ids("a", add_special=False)[-1]  # llama.cpp gives no probabilities with a part of a character
        body = {"prompt": ids, "n_predict": 1, "n_probs": count, "cache_prompt": True, "temperature": -1}
        body |= {"ignore_eos": True, "logit_bias": [[whole, 1e4]]}
        answer = self._post("/completion", body)
        return {top["id"]: top["logprob"] for top in answer["completion_probabilities"][0]["top_logprobs"]}

    def logprobs(self, ids: list[int], vocab: int) -> NDArray[np.float64]:
        """Log-probability of each id but the first, given those before it [len(ids) - 1]."""
        return np.array([self.next_logprobs(ids[:at], vocab)[ids[at]] for at in range(1, len(ids))])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(self._connection.getresponse().read())
        if "error" in answer:
            raise RuntimeError(f"llama.cpp: {answer['error']}")
        return answer
