"""Verifiers besides those of `core.verify`, one file each."""
