"""What running on an NVIDIA GPU needs besides the graphs: memory, one stream, and decode steps that decide on the device what runs."""
