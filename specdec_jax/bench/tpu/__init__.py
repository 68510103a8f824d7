"""Compile decoding for TPUs without a TPU, and report bytes, memory and copies of weights."""
