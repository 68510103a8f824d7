"""Values of settings as arguments of compiled programs.

A frozen dataclass that derives from `Settings` is a JAX pytree. Its leaves are the values of fields
declared with `traced`, unless they are neutral, and the leaves of other `Settings` in its fields.
Everything else belongs to the structure of the pytree. `jax.jit` compiles one program per
structure: one program serves every temperature above 0, and decoders whose structures differ have
different programs.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike


class HashableArray:
  """Array of a setting, on the host. It is compared by its values, and hashed once."""

  def __init__(self, values: ArrayLike, dtype: Any = None):
    self.array = np.asarray(values, dtype)
    self._hash = hash((self.array.shape, self.array.tobytes()))

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return self.array if dtype is None else self.array.astype(dtype)

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, HashableArray):
      return NotImplemented
    return self is other or np.array_equal(self.array, other.array)

  def __len__(self) -> int:
    return len(self.array)

  def __repr__(self) -> str:
    digest = hashlib.sha256(self.array.tobytes()).hexdigest()[:16]
    return f"HashableArray(shape={self.array.shape}, sha256={digest})"


def traced(default: Any, neutral: Any = None) -> Any:
  """Declare a field of `Settings` whose value is an argument of compiled programs.

  Args:
    default: default of the field.
    neutral: value that switches the setting off. A neutral value belongs to the structure, so that
      a program without the setting does not contain its computation.
  """
  return dataclasses.field(default=default, metadata={"traced": True, "neutral": neutral})


def is_neutral(value: Any, neutral: Any) -> bool:
  """Return whether a setting is switched off, as a Python bool, which is known while tracing."""
  return isinstance(value, type(None) | bool | int | float) and value == neutral


class Settings:
  """Base class of frozen dataclasses that are pytrees; see the module docstring."""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))


def _flatten(settings: Any) -> tuple[list[Any], Any]:
  if not dataclasses.is_dataclass(settings):  # all of it is part of the structure
    return [], settings
  leaves, names, static = [], [], []
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    is_value = "traced" in field.metadata and not is_neutral(value, field.metadata["neutral"])
    nested = value if isinstance(value, tuple) else (value,)
    if is_value or any(isinstance(x, Settings) for x in nested):
      leaves.append(np.asarray(value) if isinstance(value, HashableArray) else value)
      names.append(field.name)
    else:
      static.append((field.name, value))
  return leaves, (tuple(names), tuple(static))


def _unflatten(cls: type, structure: Any, leaves: Any) -> Any:
  if isinstance(structure, cls):
    return structure
  names, static = structure
  settings: Any = object.__new__(cls)  # the values were validated when the original was built
  for name, value in (*zip(names, leaves), *static):
    object.__setattr__(settings, name, value)
  return settings
