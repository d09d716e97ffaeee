"""llama.cpp's own server as `make llamacpp-native` compiles it for this machine's processor, in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tide_bench.arms.process import ArmError

NATIVE = Path("build/llamacpp-native/bin/llama-server")
_START_S = 300
_PR_SET_PDEATHSIG = 1


def native_server() -> Path | None:
    """The compiled server; None where there is none, or `benchmarks.cpu_mask` hides instructions that it is compiled for."""
    return NATIVE.absolute() if NATIVE.is_file() and "CPU_MASK" not in os.environ else None


class NativeServer:
    """`llama-server` on the GGUF file ``model`` with further ``flags``. It ends with its process or `close`.

    Raises RuntimeError with its last line where it does not start.
    """

    def __init__(self, program: Path, model: Path, flags: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.listening_address = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        command = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-ui", *flags]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, preexec_fn=_end_with_parent)
        self._wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        """Wait until the server answers that its model is loaded."""
        end = time.monotonic() + _START_S
        while self._process.poll() is None:
            try:
                urlopen(f"{self.listening_address}/health").close()
                return
            except (URLError, ConnectionError):  # 503 while the model is read
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.close()
        raise RuntimeError(lines[-1] if lines else "llama-server ended without a message")


def _end_with_parent() -> None:
    """Linux ends the server when the process that started it dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def version_of(program: Path) -> str:
    """The build that ``program`` says it is. Raises ArmError where it does not run."""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ArmError(f"{program} does not run here (exit code {done.returncode}); build it anew: make llamacpp-native")
    return next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version"))
