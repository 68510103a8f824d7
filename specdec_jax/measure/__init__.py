"""Measurement of acceptance, costs and speed, and the choice of gamma or a tree from them."""
