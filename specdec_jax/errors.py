"""What went wrong in words meant for the user, and the checks that all settings share."""

import collections.abc
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any

_MOST = 2**31 - 1  # positions and sizes are int32
_KINDS = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a text",
  types.NoneType: "None",
  collections.abc.Callable: "a function",
}


class InputError(ValueError):
  """The user's input is at fault: the message says what was given, what was expected, what to do.

  `specdec_jax.run` prints it as one sentence; any other exception is a bug and keeps its traceback.
  """


def require_count(name: str, value: Any, least: int = 1) -> None:
  """Raise InputError unless `value`, which the user knows as `name`, is such a whole number."""
  if not (_fits(value, int) and least <= value <= _MOST):
    raise InputError(
      f"{name} is {value!r:.100}; it must be a whole number, from {least} to {_MOST}."
    )


def require_seed(seed: Any) -> None:
  """Raise InputError unless `seed` is a whole number of 32 bits: jax reads no more of it."""
  if not (_fits(seed, int) and -(2**31) <= seed < 2**32):
    raise InputError(f"seed is {seed!r}; it must be a whole number from {-(2**31)} to {2**32 - 1}.")


def require_types(of: Any, values: Mapping[str, object]) -> None:
  """Raise InputError unless values, by name, have the types that `of` is annotated with.

  A function says `require_types(itself, locals())` first of all, a dataclass gives its `vars`. True
  is no number, a list may be any sequence but a text, and what is annotated `Any` is not looked at.
  """
  hints = typing.get_type_hints(of)
  for name, value in values.items():
    if not _fits(value, hints.get(name, Any)):
      raise InputError(f"{name} is {value!r:.100}; it must be {_told(hints[name])}.")


def _fits(value: Any, hint: Any) -> bool:
  kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind in (types.UnionType, typing.Union):
    return any(_fits(value, one) for one in inside)
  if kind is typing.Literal:
    return value in inside
  if kind in (int, float):
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
    return is_number and not isinstance(value, bool)
  if kind is Any or not isinstance(kind, type):
    return True
  if not (inside and issubclass(kind, collections.abc.Sequence)):
    return isinstance(value, kind)
  if not isinstance(value, collections.abc.Sequence) or isinstance(value, str):
    return False
  fixed = kind is tuple and inside[-1] is not Ellipsis
  each = inside if fixed else inside[:1] * len(value)
  return len(value) == len(each) and all(map(_fits, value, each))


def _told(hint: Any) -> str:
  kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind in (types.UnionType, typing.Union):
    return " or ".join(map(_told, inside))
  if kind is typing.Literal:
    return " or ".join(map(repr, inside))
  if kind is tuple and inside[-1:] != (Ellipsis,):
    return f"({', '.join(map(_told, inside))})"
  if inside and issubclass(kind, collections.abc.Sequence):
    return f"a list (each {_told(inside[0])})"
  return _KINDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
