"""Checkpoints: one reader per format, and `load`, which reads any of them."""
