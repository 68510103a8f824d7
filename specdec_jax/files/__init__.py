"""Decoding of files: sources and records, descriptions of runs, and the Apache Beam pipeline."""
