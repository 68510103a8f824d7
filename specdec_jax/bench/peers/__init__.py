"""Other libraries that decode a T5, as backends of `bench.peers.compare`; all are optional."""
