"""Sources to cubins: find NVRTC, compile, read what each kernel takes of a GPU, and keep the images."""
