"""Vocabularies, text files, dialogs and seqio tasks."""
