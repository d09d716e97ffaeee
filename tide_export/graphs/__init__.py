"""The graphs that a trace becomes: segments between the layers where tokens may stop, exits, loops, recurrent states."""
