"""The models of a server, by the names that requests give."""
