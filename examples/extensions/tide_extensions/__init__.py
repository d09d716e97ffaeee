"""What docs/extending.md describes, one file for each kind."""
