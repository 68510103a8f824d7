"""Vocabularies and texts."""
