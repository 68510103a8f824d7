"""Tests of studies are slow: the default run leaves them out."""

import pathlib

import pytest


def pytest_collection_modifyitems(items):
  for item in items:
    if pathlib.Path(__file__).parent in item.path.parents:
      item.add_marker(pytest.mark.slow)
