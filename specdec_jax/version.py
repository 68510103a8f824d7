"""The version of the package, read by pyproject.toml, records and users."""

__version__ = "0.1.0"
