"""Write the tokenizer into the bundle: tokenizer.json, the chat template, the special tokens."""

from __future__ import annotations

from pathlib import Path

from tide_runtime.bundle.manifest import TokenizerInfo
from tide_runtime.errors import ModelFilesError
from transformers import PreTrainedTokenizerFast


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, vocab_size: int, directory: Path) -> TokenizerInfo:
    """Write the files under ``directory`` / tokenizer. Raises ModelFilesError if it has more tokens than the vocabulary."""
    tokens = len(tokenizer)
    if tokens > vocab_size:
        raise ModelFilesError(
            f"the tokenizer has {tokens} tokens, the model's vocabulary {vocab_size}: it belongs to another model; "
            "put the model's own tokenizer.json into its directory"
        )
    folder = directory / "tokenizer"
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerInfo("tokenizer/tokenizer.json", "tokenizer/chat_template.jinja" if template else None, special)
