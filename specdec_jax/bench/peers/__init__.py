"""Other libraries that decode a T5, as backends of speed comparisons; all of them are optional."""
