"""Exactness checker: compares decoding with the target's own distributions."""
