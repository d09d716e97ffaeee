"""Training of the demo models: one idea per module, driven by `examples/train_demo_model.py`."""
