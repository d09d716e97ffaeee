"""The runtime is for machines without torch: a serving image must not need it, nor start slowly because of it."""

import subprocess
import sys
from pathlib import Path

EXPORT_ONLY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "tide_export")
LATE = ("jinja2", "typer", "rich", "click", "tokenizers")

IMPORT = f"""
import sys, time
start = time.perf_counter()
import tide_runtime
print(f"import tide_runtime: {{time.perf_counter() - start:.2f}} s")
print("loaded:", [name for name in {EXPORT_ONLY + LATE!r} if name in sys.modules])
"""

GENERATE = f"""
import sys
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
with Engine.load(sys.argv[1], EngineOptions(threads=ThreadOptions(1))) as engine:
    params = GenerationParams(max_new_tokens=4, temperature=0.8, seed=1, stop=("zzz",), logprobs=2, ignore_eos=True)
    assert len(engine.generate(["def add(a, b):", [5, 6, 7]], params)[0].token_ids) == 4
    prompt = engine.chat_prompt([{{"role": "user", "content": "hello"}}])
    assert len(list(engine.stream(prompt, params))) == 4
print("loaded:", [name for name in {EXPORT_ONLY!r} if name in sys.modules])
"""


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_the_exporter_nor_what_only_some_calls_need() -> None:
    output = _run(IMPORT)
    print(output)  # the time is a fact for the reader; it decides nothing
    assert "loaded: []" in output


def test_generating_text_and_chat_needs_no_torch(bundle: Path) -> None:
    assert "loaded: []" in _run(GENERATE, str(bundle))
