"""What went wrong in words meant for the user, and the checks that all settings share."""

import collections.abc
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

_MOST = 2**31 - 1  # positions and sizes are int32
_TEXTS = str, bytes, bytearray, memoryview  # sequences of what nobody means by a list
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
      f"{name} is {shown(value)}; it must be a whole number, from {least} to {_MOST}."
    )


def require_number(
  name: str, value: Any, low: float, high: float, ends: str = "[]", note: str = ""
) -> float:
  """Return `value`, which the user knows as `name`, as a float; whatever kind of number it is.

  Args:
    name: of the setting.
    value: given for it.
    low: least value.
    high: greatest value; infinity itself is never allowed.
    ends: brackets of the interval; a round one excludes that end.
    note: what the message says after the interval.

  Raises:
    InputError: `value` is no number, NaN, or outside the interval.
  """
  if _fits(value, float):
    number = float(value)
    above = low <= number if ends[0] == "[" else low < number
    below = number <= high if ends[1] == "]" else number < high
    if above and below and math.isfinite(number):
      return number
  bounds = f"lie in {ends[0]}{low:g}, {high:g}{ends[1]}"
  if high == math.inf:
    bounds = f"be a finite number {'from' if ends[0] == '[' else 'above'} {low:g}"
  raise InputError(f"{name} is {shown(value)}; it must {bounds}{note}.")


def require_text(name: str, text: str, errors: str = "strict") -> None:
  """Raise InputError unless `text`, which the user knows as `name`, can be written as UTF-8 and has
  no NUL character, at which C libraries end a text.

  With `errors` "surrogateescape" it is the path of a file, which need not be UTF-8.
  """
  if "\0" in text:
    raise InputError(
      f"{name} has a NUL character at position {text.index(chr(0))}; a text ends there for the "
      "libraries that read it, so take it out."
    )
  try:
    text.encode(errors=errors)
  except UnicodeEncodeError as error:
    raise InputError(
      f"{name} has half a surrogate pair, {text[error.start]!a}, at position {error.start}, which "
      "UTF-8 cannot write; decode it as the encoding that it was written in."
    ) from error


def shown(value: Any) -> str:
  """A value as messages show it: one line, at most 100 characters."""
  try:
    return re.sub(r"\s*\n\s*", " ", repr(value))[:100]
  except Exception:  # as of a whole number of 5,000 digits, or by an object of the user's
    return f"<{type(value).__name__}>"


def require_seed(seed: Any) -> None:
  """Raise InputError unless `seed` is a whole number of 32 bits: jax reads no more of it."""
  if not (_fits(seed, int) and -(2**31) <= seed < 2**32):
    raise InputError(
      f"seed is {shown(seed)}; it must be a whole number from {-(2**31)} to {2**32 - 1}."
    )


def require_types(of: Any, values: Mapping[str, object]) -> None:
  """Raise InputError unless values, by name, have the types that `of` is annotated with.

  A function says `require_types(itself, locals())` first of all, a dataclass gives its `vars`. True
  is no number, nor is what no float can hold; a list may be any sequence but a text or bytes, and
  what is annotated `Any` is not looked at.
  """
  hints = typing.get_type_hints(of)
  for name, value in values.items():
    if not _fits(value, hints.get(name, Any)):
      raise InputError(f"{name} is {shown(value)}; it must be {_told(hints[name])}{_limit(value)}.")


def _fits(value: Any, hint: Any) -> bool:
  kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind in (types.UnionType, typing.Union):
    return any(_fits(value, one) for one in inside)
  if kind is typing.Literal:
    return any(isinstance(value, type(one)) and value == one for one in inside)
  if kind in (int, float):
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
    return is_number and not isinstance(value, bool) and (kind is int or _is_float(value))
  if kind is Any or not isinstance(kind, type):
    return True
  if not (inside and issubclass(kind, collections.abc.Sequence)):
    return isinstance(value, kind)
  if not isinstance(value, collections.abc.Sequence) or isinstance(value, _TEXTS):
    return False
  fixed = kind is tuple and inside[-1] is not Ellipsis
  each = inside if fixed else inside[:1] * len(value)
  return len(value) == len(each) and all(map(_fits, value, each))


def _is_float(value: numbers.Real) -> bool:
  try:
    float(value)
  except OverflowError:  # a whole number of 400 digits
    return False
  return True


def _limit(value: Any) -> str:
  """Return the largest float, for a message about a number that exceeds it; else nothing."""
  too_large = isinstance(value, numbers.Real) and not _is_float(value)
  return f" of at most {sys.float_info.max:.1e}" if too_large else ""


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
