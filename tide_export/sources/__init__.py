"""Where parameters, tokenizer and settings come from: HuggingFace folders, GGUF files, quantised checkpoints."""
