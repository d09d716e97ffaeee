"""The kit's stages: each module's ``cases`` lists what it asks of the GPU."""
