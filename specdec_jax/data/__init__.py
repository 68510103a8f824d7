"""Vocabularies, text files, quality metrics and seqio tasks."""
