"""``python -m tide_plugins``."""

from tide_plugins.cli import main

main()
