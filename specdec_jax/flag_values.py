"""Settings as flags: a type tells how the text of a flag is read, a docstring what it means."""

import ast
import collections.abc
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from specdec_jax import registry

_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


def read(text: str, kind: Any) -> Any:
  """Return the value of a flag.

  A text is taken as it is where the setting is a text. Sequences are written `3,5`, `3` for one
  element, or as in Python, and only so where the setting may be a text. A sequence of sequences may
  be one of them, as in `0,0,1`.

  Args:
    kind: type of the setting; a value of no type that a flag can have is read as in Python, or else
      is a text.

  Raises:
    ValueError: the text is not a value of this type.
  """
  options = members(kind)
  for option in sorted(options, key=_last):
    if str in options and _is_sequence(option) and not text.startswith(("(", "[")):
      continue
    try:
      return _read_one(text, option)
    except (KeyError, ValueError, SyntaxError):
      continue
  raise ValueError(f"{text!r} is not {described(kind)}")


def members(kind: Any) -> tuple[Any, ...]:
  """Return the types of a union, or the type alone."""
  is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
  return typing.get_args(kind) if is_union else (kind,)


def described(kind: Any) -> str:
  """Return a type in words, for an error."""
  names = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "None"}
  words: list[str] = []
  for option in members(kind):
    of = typing.get_args(option)
    if typing.get_origin(option) is Literal:
      words += map(repr, of)
    elif _is_sequence(option):
      words.append(f"a list of which each is {described(of[0])}" if of else "a list")
    else:
      words.append(names.get(option, getattr(option, "__name__", str(option))))
  return " or ".join(words)


def meaning(function: Callable[..., Any], parameter: str) -> str:
  """Return the first words on a parameter in the docstring of a function or class, or ''.

  Arguments that the docstring leaves out may be those of another function, which it names.
  """
  line = rf"^  (?:\w+, )*{parameter}(?:, \w+)*: (.+(?:\n   .*)*)"
  text = inspect.getdoc(function) or ""
  found = re.search(line, text, re.MULTILINE)
  other = re.search(r"Other\s+arguments\s+are\s+those\s+of\s+`([\w.]+)[.](\w+)`", text)
  if other and not found:
    return meaning(registry.imported(f"specdec_jax.{other[1]}:{other[2]}"), parameter)
  words = " ".join(found[1].split()).partition(". ")[0] if found else ""
  return textwrap.shorten(words.rstrip("."), 80, placeholder=" ...")


def _last(option: Any) -> int:
  """Order the types of a union: any text is a text, so that this type comes after others."""
  return 1 if option is str else 2 if _is_other(option) else 0


def _is_other(option: Any) -> bool:
  known = option in (bool, int, float, str, None, types.NoneType) or _is_sequence(option)
  return not known and typing.get_origin(option) is not Literal


def _is_sequence(option: Any) -> bool:
  return (typing.get_origin(option) or option) in _SEQUENCES


def _read_one(text: str, option: Any) -> Any:
  if option in (None, types.NoneType):
    return {"None": None}[text]
  if option is bool:
    return _BOOLEANS[text]
  if option in (int, float, str):
    return option(text)
  if typing.get_origin(option) is Literal:
    return {str(each): each for each in typing.get_args(option)}[text]
  if _is_sequence(option):
    return _read_sequence(text, *typing.get_args(option)[:1])
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _read_sequence(text: str, element: Any = Any) -> list | tuple:
  if text.startswith(("(", "[")):
    value = ast.literal_eval(text)
    return value if isinstance(value, (list, tuple)) else (value,)  # (3)
  if _is_sequence(element):
    return (_read_sequence(text, *typing.get_args(element)[:1]),)
  return tuple(read(part.strip(), element) for part in text.split(",")) if text else ()
