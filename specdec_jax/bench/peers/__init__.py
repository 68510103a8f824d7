"""Other libraries that run T5 models, as optional backends of speed comparisons."""
