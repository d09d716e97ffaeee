"""GGUF files: metadata, tensors in their blocks, and tokenizers, as llama.cpp reads them."""
