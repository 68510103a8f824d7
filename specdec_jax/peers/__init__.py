"""Other libraries that decode a T5, as backends of `commands.peers`; all are optional."""
