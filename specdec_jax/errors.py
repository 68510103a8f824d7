"""InputError, the exception for invalid input, and checks of settings that raise it."""

import math
import numbers
import re
from collections.abc import Iterable
from typing import Any

_MAX_INT32 = 2**31 - 1  # positions and sizes are int32


class InputError(ValueError):
  """Exception for invalid input of the user.

  The message says what was given, what was expected and what to do. `specdec_jax.run` prints it
  without a traceback.
  """


def require_count(name: str, value: Any, least: int = 1) -> None:
  """Raise InputError unless the value of a setting is a whole number from `least` to 2^31 - 1."""
  if not (isinstance(value, numbers.Integral) and least <= int(value) <= _MAX_INT32):
    raise InputError(
      f"{name} is {shown(value)}; it must be a whole number, from {least} to {_MAX_INT32}."
    )


def require_number(
  name: str, value: Any, low: float, high: float, ends: str = "[]", note: str = ""
) -> float:
  """Return the value of a setting as a float, or raise InputError unless it lies in an interval.

  A parenthesis in `ends` excludes that end. NaN and infinity are never accepted, also if `high` is
  infinite. `note` follows the interval in the message.
  """
  number = float(value) if isinstance(value, numbers.Real) else math.nan
  above = low <= number if ends[0] == "[" else low < number
  below = number <= high if ends[1] == "]" else number < high
  if above and below and math.isfinite(number):
    return number
  bounds = f"lie in {ends[0]}{low:g}, {high:g}{ends[1]}"
  if high == math.inf:
    bounds = f"be a finite number {'from' if ends[0] == '[' else 'above'} {low:g}"
  raise InputError(f"{name} is {shown(value)}; it must {bounds}{note}.")


def require_tokens(name: str, sequences: Iterable[Iterable[Any]], vocab_size: int) -> None:
  """Raise InputError unless each sequence has tokens, whole numbers from 0 to vocab_size - 1."""
  for tokens in map(list, sequences):
    valid = (isinstance(x, numbers.Integral) and 0 <= int(x) < vocab_size for x in tokens)
    if not (tokens and all(valid)):
      raise InputError(
        f"{name} has the sequence {shown(tokens)}; each must have tokens, whole numbers from 0 to "
        f"{vocab_size - 1}."
      )


def require_text(name: str, text: Any) -> None:
  """Raise InputError unless `text` is a string without NUL characters, where C libraries end it."""
  if not isinstance(text, str):
    raise InputError(f"{name} is {shown(text)}; it must be a string.")
  if "\0" in text:
    raise InputError(f"{name} has a NUL character at position {text.index(chr(0))}; remove it.")


def require_seed(seed: Any) -> None:
  """Raise InputError unless `seed` is an integer that fits in int32 or uint32, as jax requires."""
  if not (isinstance(seed, numbers.Integral) and -(2**31) <= int(seed) < 2**32):
    raise InputError(
      f"seed is {shown(seed)}; it must be a whole number from {-(2**31)} to {2**32 - 1}."
    )


def shown(value: Any) -> str:
  """Return the representation of a value for messages: one line of at most 100 characters."""
  return re.sub(r"\s*\n\s*", " ", repr(value))[:100]
