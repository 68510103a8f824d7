"""Measurement of acceptance, costs and speed, and the choice of gamma from them."""
