"""The commands ``tide-run`` and ``tide-inspect``. Only these modules import typer and rich; the library never does."""
