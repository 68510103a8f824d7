"""Other programs that decode a T5, for `experiments.peers`; none of them needs to be installed."""
