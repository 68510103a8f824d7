"""Backends of other libraries that decode a T5. All of these libraries are optional."""
