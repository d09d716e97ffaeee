"""A real bundle for the runtime's tests: a tiny random Llama with tokenizer and chat template, exported once a session.

Without torch, as in ``make pythons``, the tests take the bundle in the folder ``$TIDE_TEST_BUNDLE`` (`write_bundle`), and
those that compare with torch or transformers are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_in_process import Done, cli_runner
from cuda_in_fp32 import cuda_in_fp32
from runtime.made_up_calibration import calibrate, exit_after
from shared_once import shared_once
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.cli import inspect, run

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HAS_TORCH = find_spec("torch") is not None
_NEEDS_TORCH = re.compile(r"^(import|from) (torch|transformers|tide_export|runtime\.test_engine)\b", re.M)
collect_ignore = [
    str(file)
    for file in Path(__file__).parent.rglob("test_*.py")
    if not HAS_TORCH and _NEEDS_TORCH.search(file.read_text(encoding="utf-8"))
]
MAX_SEQ_LEN = 64
CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"""
CORPUS = ["def add(a, b):\n    return a + b\n", "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"]


def pytest_report_header() -> str | None:
    return None if HAS_TORCH else f"no torch: {len(collect_ignore)} files of tests that compare with it are left out"


@pytest.fixture(scope="session")
def hf_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as its authors would publish it: config, safetensors, tokenizer, chat template, generation config."""
    if not HAS_TORCH:
        pytest.skip("needs torch and transformers")
    return shared_once(tmp_path_factory, "models/tiny-llama", write_model)


def write_model(directory: Path) -> Path:
    from tiny_llama import train_tokenizer, write_tiny_llama

    return write_tiny_llama(directory, train_tokenizer(CORPUS, 290, CHATML), 2 * MAX_SEQ_LEN)


@pytest.fixture(scope="session")
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle made from it by the real exporter. Shared: tests must not change it (see `bundle_copy`)."""
    if not HAS_TORCH and "TIDE_TEST_BUNDLE" in os.environ:
        return Path(os.environ["TIDE_TEST_BUNDLE"])
    model = request.getfixturevalue("hf_model_directory")
    return shared_once(tmp_path_factory, "bundles/tiny", lambda folder: write_bundle(model, folder))


def write_bundle(model: Path, out: Path) -> Path:
    from tide_export.config import ExportConfig
    from tide_export.export import export

    config = ExportConfig(checkpoints="1,3", max_seq_len=MAX_SEQ_LEN, verify=False, targets=("cpu", "cuda", "torch"))
    with cuda_in_fp32():
        export(str(model), out, config)
    return out


@pytest.fixture(scope="session")
def exits_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with an exit at both checkpoints."""

    def write(folder: Path) -> None:
        shutil.copytree(bundle, folder)
        calibrate(folder, exits=[exit_after(1), exit_after(3)])

    return shared_once(tmp_path_factory, "exits/tiny", write)


@pytest.fixture
def bundle_copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def load(bundle: Path) -> Callable[..., Engine]:
    """Load the bundle with engine options; one thread, as the tests share the machine."""

    def load_with(**options: object) -> Engine:
        return Engine.load(bundle, EngineOptions(threads=ThreadOptions(1), **options))  # type: ignore[arg-type]

    return load_with


@pytest.fixture(scope="module")
def engine(load: Callable[..., Engine]) -> Iterator[Engine]:
    with load() as loaded:
        yield loaded


@pytest.fixture(scope="session")
def hf_model(hf_model_directory: Path) -> LlamaForCausalLM:
    """The eager model, the reference for everything the engine computes."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(hf_model_directory).eval()


@pytest.fixture(scope="session")
def hf_tokenizer(hf_model_directory: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(hf_model_directory)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """``command("run", …)``: run a command of the package in this process, whose sessions cannot share a pool of threads."""
    monkeypatch.setattr(run, "ThreadOptions", lambda count, shared: ThreadOptions(count or 1))

    def run_command(module: str, *arguments: object, **options: str) -> Done:
        main = {"run": run, "inspect": inspect}[module].main
        return cli_runner(f"tide-{module}", main, monkeypatch, capsys, 120)(*arguments, **options)

    return run_command


@pytest.fixture(scope="session")
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``process("run", …)``: run it in a process of its own."""

    def run_process(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"tide_runtime.cli.{module}", *map(str, arguments)]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=60)

    return run_process
