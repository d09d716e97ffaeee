"""The kit's stages; ``cases`` of each module lists what it runs on the GPU."""
