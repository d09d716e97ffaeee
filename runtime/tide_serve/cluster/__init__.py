"""The server on a Ray cluster: what an ingress forwards, where to, and what a model replica does with it."""
