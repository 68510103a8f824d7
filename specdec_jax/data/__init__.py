"""Vocabularies, text files, dialogs, synthetic errors, seqio tasks and TFDS data sets."""
