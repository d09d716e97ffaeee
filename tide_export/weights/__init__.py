"""The weights of a bundle: low-bit matrices, those that are made when they are written, and the file that holds all."""
