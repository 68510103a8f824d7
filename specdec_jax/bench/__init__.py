"""Measurements for the paper's tables: drafts, trees, beams, gamma, TPU programs, and peers."""
