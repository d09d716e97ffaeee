"""A tokenizer for models of random weights: one token for each ASCII character, as the smallest have 128 ids."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json into ``folder``: an export refuses a model without one."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE({spelling.pre_tokenize_str(chr(byte))[0][0]: byte for byte in range(128)}, []))
    tokenizer.pre_tokenizer = spelling
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
