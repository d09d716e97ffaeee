"""One trace of an unmodified model, of two layers of each kind, kept in the machine's cache."""
