"""Checkpoints: one reader module per format, and `load`, which reads a checkpoint of any format."""
