"""`tide-bench`: what a bundle is worth on this machine, against the other ways to run its model, taken in turn."""
