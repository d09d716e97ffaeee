"""What a finished bundle is held to: the eager model, the file's own values, llama.cpp's rules."""
