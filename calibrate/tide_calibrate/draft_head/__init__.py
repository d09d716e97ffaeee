"""The draft head: guesses tokens from the model's final state, for policy ``exact``."""
