"""The version, in the one place that setup.py, records and readers look at."""

__version__ = "0.1.0"
