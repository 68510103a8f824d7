"""The version, in the one place that pyproject.toml, records and readers look at."""

__version__ = "0.1.0"
