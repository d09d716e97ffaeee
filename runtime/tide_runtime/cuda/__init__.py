"""Running on an NVIDIA GPU, besides the graphs: memory, one stream, decode steps that decide on the device what runs."""
