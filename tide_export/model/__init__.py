"""A transformers model as the exporter runs it: boundaries of its layers, markers in place of attention and recurrence, masks."""
