"""llama.cpp on a GGUF file: its server compiled for this machine where `make llamacpp-native` has built one, else that of the
prebuilt wheel `xllamacpp`, which is compiled for AVX2; called over HTTP.

Only the server's own HTTP interface takes and returns token ids. All prompts are one request, so they are prefilled together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.request import Request, urlopen

from tide_bench.arms.base import Timing
from tide_bench.arms.llamacpp_native import NativeServer, native_server, version_of
from tide_bench.arms.process import ArmError
from tide_bench.report import cores

_MISSING = "llama.cpp is not installed; make llamacpp-native, or pip install xllamacpp"
_OWN_HOST = "http://127.0.0.1"  # the server listens nowhere else
_FEWEST_SLOTS = 256  # llama.cpp rounds caches up to it


class LlamacppArm:
    """Its KV caches hold the requested sequences and tokens: a call that needs larger ones first loads the model again, untimed.

    llama.cpp never samples an end-of-sequence id, where other arms may write one and go on; texts part there.

    Args:
        folder: the GGUF file.
        flags: further ones of the compiled server, such as those of its drafts; the wheel's takes none.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self._flags = tuple(flags)
        self._native = native_server()
        if flags and self._native is None:
            raise ArmError(f"{' '.join(flags)} is for the compiled server; make llamacpp-native")
        self._library: Any = None if self._native else _wheel()
        self._server: Any = None
        self._sizes = (0, 0)
        self._keeps = False
        self._load(rows=1, tokens=_FEWEST_SLOTS)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """Decoding is timed by llama.cpp: the sequences decode in lockstep, so the one that began last took the shortest time."""
        self._load(len(prompts), max(_FEWEST_SLOTS, len(prompts[0]) + new_tokens))
        settings = {"n_predict": new_tokens, "temperature": 0, "samplers": ["temperature"], "ignore_eos": True}
        body = {"prompt": prompts, **settings, "cache_prompt": False, "return_tokens": True}
        start = perf_counter()
        answer = self._call("/completion", body)
        wall = perf_counter() - start
        rows = answer if isinstance(answer, list) else [answer]
        decode_s = min(row["timings"]["predicted_ms"] for row in rows) / 1e3
        limitation = None if self._native else "the wheel, compiled for AVX2"
        return Timing([row["tokens"] for row in rows], wall - decode_s, decode_s, limitation=limitation)

    def serve(self, sequences: int, tokens: int, keep_prefixes: bool = False) -> str:
        """The HTTP address of its server, loaded for ``sequences`` sequences at once of up to ``tokens`` tokens each.

        ``keep_prefixes``: keep the keys and values of earlier texts, as llama.cpp's server does by default.
        """
        self._load(sequences, max(_FEWEST_SLOTS, tokens), keep_prefixes)
        return str(self._server.listening_address)

    def build(self) -> str:
        """Which llama.cpp runs, how it was compiled, and its threads; every other setting is its own default."""
        if self._native:
            return f"{version_of(self._native)}, GGML_NATIVE, {cores()} threads"
        return f"xllamacpp {version('xllamacpp')}, {cores()} threads; {self._library.get_system_info()}"

    def _load(self, rows: int, tokens: int, keep_prefixes: bool = False) -> None:
        """A server for ``rows`` sequences of ``tokens`` tokens, unless the one that runs is large enough."""
        if self._sizes[0] == rows and self._sizes[1] >= tokens and self._keeps == keep_prefixes:
            return
        self.close()
        start: Callable[[int, int, bool], Any] = self._start_native if self._native else self._start_wheel
        try:
            self._server = start(rows, rows * tokens, keep_prefixes)
        except RuntimeError as error:
            raise ArmError(f"llama.cpp cannot load {self.folder} ({error}); give a complete .gguf with --gguf") from error
        self._call("/health")  # a server that ends before it accepts connections waits forever
        self._sizes = (rows, tokens)
        self._keeps = keep_prefixes

    def close(self) -> None:
        if isinstance(self._server, NativeServer):
            self._server.close()
        self._server = None

    def _start_native(self, rows: int, slots: int, keep_prefixes: bool) -> NativeServer:
        assert self._native is not None
        flags = ["--threads", cores(), "--parallel", rows, "--ctx-size", slots, "--fit", "off", *self._flags]
        if not keep_prefixes:
            flags += ["--no-cache-prompt", "--cache-ram", 0, "--no-cache-idle-slots"]
        return NativeServer(self._native, self.folder, [str(flag) for flag in flags])

    def _start_wheel(self, rows: int, slots: int, keep_prefixes: bool) -> Any:
        params = self._library.CommonParams()
        params.model.path = str(self.folder)
        params.n_parallel = rows
        params.n_ctx = slots
        params.cont_batching = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores()
        params.n_gpu_layers, params.fit_params = 0, False  # the processor; these sizes, whatever memory is free
        if not keep_prefixes:
            params.cache_prompt = False
            params.cache_ram_mib = 0
            params.cache_idle_slots = False
        params.verbosity = -1
        return self._library.Server(params)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer to GET, or to POST of ``body``."""
        address = self._server.listening_address + path
        if not address.startswith(_OWN_HOST):
            raise ArmError(f"llama.cpp's server is at {address}, expected {_OWN_HOST}")
        data = json.dumps(body).encode() if body is not None else None
        with urlopen(Request(address, data, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)


def _wheel() -> Any:
    """The package's module. Raises ArmError where it is not installed."""
    try:
        import xllamacpp
    except ImportError as error:
        raise ArmError(_MISSING) from error
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start gdb
    return xllamacpp
