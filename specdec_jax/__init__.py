"""Exact speculative decoding in JAX.

  pair = specdec_jax.load_pair()
  pair.generate(["A man runs."], gamma=5)

Loading this loads next to nothing: `load_pair` and `random_pair` are found when they are asked for.
Whatever is imported, `xla_flags` comes first.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specdec_jax.version import __version__
from specdec_jax.xla_flags import turn_ynn_off

if TYPE_CHECKING:
  from specdec_jax.api import load_pair, random_pair

__all__ = ["__version__", "load_pair", "random_pair"]

turn_ynn_off()


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module 'specdec_jax' has no attribute {name!r}")
  return getattr(importlib.import_module("specdec_jax.api"), name)
