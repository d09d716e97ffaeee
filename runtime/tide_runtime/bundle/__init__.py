"""A bundle on disk: its manifest, its files and their hashes."""

from tide_runtime.bundle.bundle import Bundle, sha256_of

__all__ = ["Bundle", "sha256_of"]
