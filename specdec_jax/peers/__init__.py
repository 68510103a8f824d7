"""Other programs that decode a T5, for `commands.peers`; none of them needs to be installed."""
