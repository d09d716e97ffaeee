"""Write the tokenizer into the bundle: tokenizer.json, the chat templates, the special tokens."""

from __future__ import annotations

from pathlib import Path

from tide_runtime.bundle.manifest import TokenizerInfo
from transformers import PreTrainedTokenizerFast

_TEMPLATES = {
    "default": "chat_template",
    "tool_use": "tool_chat_template",
}  # transformers' names of those that it chooses by itself


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> TokenizerInfo:
    """Write the files under ``directory`` / tokenizer. It may have more tokens than the model, which prompts must not use."""
    folder = directory / "tokenizer"
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates}
    files = {}
    for name, field in _TEMPLATES.items():
        if template := named.get(name):
            (folder / f"{field}.jinja").write_text(template, encoding="utf-8")
            files[field] = f"tokenizer/{field}.jinja"
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerInfo("tokenizer/tokenizer.json", files.get("chat_template"), special, files.get("tool_chat_template"))
