"""InputError, the exception for invalid input, and checks of settings that raise it."""

import collections.abc
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

_MAX_INT32 = 2**31 - 1  # positions and sizes are int32
_STRINGS = str, bytes, bytearray, memoryview  # sequences that are not accepted as lists
_TYPE_NAMES = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a string",
  types.NoneType: "None",
  collections.abc.Callable: "a function",
}


class InputError(ValueError):
  """Exception for invalid input of the user.

  The message says what was given, what was expected and what to do. `specdec_jax.run` prints it as
  one line. Exceptions that are bugs keep their traceback (`user_errors.format_error`).
  """


def require_count(name: str, value: Any, least: int = 1) -> None:
  """Raise InputError unless the value of a setting is a whole number from `least` to 2^31 - 1."""
  if not (_fits(value, int) and least <= value <= _MAX_INT32):
    raise InputError(
      f"{name} is {shown(value)}; it must be a whole number, from {least} to {_MAX_INT32}."
    )


def require_number(
  name: str, value: Any, low: float, high: float, ends: str = "[]", note: str = ""
) -> float:
  """Return the value of a setting as a float, if it lies in an interval.

  Args:
    name: name of the setting.
    value: value of the setting, a real number of any type.
    low: lower end of the interval.
    high: upper end of the interval. If it is infinite, there is no upper limit for finite numbers.
    ends: brackets of the interval. A parenthesis means that the end is excluded.
    note: text that follows the interval in the message.

  Raises:
    InputError: `value` is not a number, is NaN or infinite, or lies outside the interval.
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
  """Raise InputError unless a text can be encoded as UTF-8 and contains no NUL character.

  C libraries end a text at a NUL character.

  Args:
    name: name of the setting, for the message.
    text: the text.
    errors: error handler for the encoding. "surrogateescape" also accepts paths of files that are
      not UTF-8.
  """
  if "\0" in text:
    raise InputError(
      f"{name} has a NUL character at position {text.index(chr(0))}, where the libraries that read "
      "a text end it; remove it."
    )
  try:
    text.encode(errors=errors)
  except UnicodeEncodeError as error:
    raise InputError(
      f"{name} has half a surrogate pair, {text[error.start]!a}, at position {error.start}, which "
      "UTF-8 cannot encode; decode the text with the encoding that it was written in."
    ) from error


def shown(value: Any) -> str:
  """Return the representation of a value for messages: one line of at most 100 characters."""
  try:
    return re.sub(r"\s*\n\s*", " ", repr(value))[:100]
  except Exception:  # for example, an int of 5,000 digits, or an object of the user's
    return f"<{type(value).__name__}>"


def require_seed(seed: Any) -> None:
  """Raise InputError unless `seed` is an integer that fits in int32 or uint32, as jax requires."""
  if not (_fits(seed, int) and -(2**31) <= seed < 2**32):
    raise InputError(
      f"seed is {shown(seed)}; it must be a whole number from {-(2**31)} to {2**32 - 1}."
    )


def require_types(annotated: Any, values: Mapping[str, object]) -> None:
  """Raise InputError unless values have the types in the annotations of a function or dataclass.

  A function calls `require_types(function, locals())` in its first line. A bool is not accepted as
  a number, and an int that exceeds the range of a float is not accepted as a float. For an
  annotation such as `list[int]`, any sequence with items of that type is accepted, except strings
  and bytes. A value with the annotation `Any` is not checked.

  Args:
    annotated: function or dataclass with annotations.
    values: arguments or fields by name.
  """
  hints = typing.get_type_hints(annotated)
  for name, value in values.items():
    if not _fits(value, hints.get(name, Any)):
      expected, limit = _describe(hints[name]), _limit(value)
      if limit and expected.endswith(" or None"):  # the limit is that of the number
        expected = "None or " + expected.removesuffix(" or None")
      raise InputError(f"{name} is {shown(value)}; it must be {expected}{limit}.")


def _fits(value: Any, hint: Any) -> bool:
  """Return True if a value has the annotated type; see `require_types`."""
  kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind in (types.UnionType, typing.Union):
    return any(_fits(value, option) for option in arguments)
  if kind is typing.Literal:
    return any(isinstance(value, type(option)) and value == option for option in arguments)
  if kind in (int, float):
    is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
    return is_number and not isinstance(value, bool) and (kind is int or _is_float(value))
  if kind is Any or not isinstance(kind, type):
    return True
  if not (arguments and issubclass(kind, collections.abc.Sequence)):
    return isinstance(value, kind)
  if not isinstance(value, collections.abc.Sequence) or isinstance(value, _STRINGS):
    return False
  has_fixed_length = kind is tuple and arguments[-1] is not Ellipsis
  item_hints = arguments if has_fixed_length else arguments[:1] * len(value)
  return len(value) == len(item_hints) and all(map(_fits, value, item_hints))


def _is_float(value: numbers.Real) -> bool:
  try:
    float(value)
  except OverflowError:  # for example, an int of 400 digits
    return False
  return True


def _limit(value: Any) -> str:
  """Return a part of a message that names the largest float; '' if the value does not exceed it."""
  too_large = isinstance(value, numbers.Real) and not _is_float(value)
  return f" of at most {sys.float_info.max:.1e}" if too_large else ""


def _describe(hint: Any) -> str:
  """Return the description of a type annotation for messages."""
  kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
  if kind in (types.UnionType, typing.Union):
    return " or ".join(map(_describe, arguments))
  if kind is typing.Literal:
    return " or ".join(map(repr, arguments))
  if kind is tuple and arguments[-1:] != (Ellipsis,):
    return f"({', '.join(map(_describe, arguments))})"
  if arguments and issubclass(kind, collections.abc.Sequence):
    return f"a list (each {_describe(arguments[0])})"
  return _TYPE_NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")
