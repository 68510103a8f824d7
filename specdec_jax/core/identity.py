"""Descriptions of what a file was made from, so that another run can tell whether it may use it."""

import hashlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax.errors import InputError, shown


def described(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return a JSON object that identifies values: numbers, short strings and representations.

  A long representation ends with a hash. A value whose representation has an address in memory,
  such as a function, has no identity, and becomes an object; see `require_same`.
  """
  return {name: _described(value) for name, value in values.items()}


def _described(value: Any) -> Any:
  if value is None or isinstance(value, bool | int | float):
    return value
  with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # all numbers of an array
    text = value if isinstance(value, str) else repr(value)
  if not isinstance(value, str) and re.search(r" at 0x[0-9a-f]+", text):
    return {"without identity": shown(value)}
  return text if len(text) <= 100 else f"{text[:60]}... (sha256 {_digest(text.encode())})"


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], run: str, advice: str) -> None:
  """Raise InputError, which names the difference, unless two results of `described` are equal.

  A value without identity does not equal any value. The message begins with `run`, the name of the
  earlier run, and ends with `advice`.
  """
  # First those that only one run has: others, such as the draft, may depend on them.
  for name in sorted({**now, **before}, key=lambda name: name in before and name in now):
    was, value = before.get(name), now.get(name)
    if isinstance(value, dict):
      (value,) = value.values()
      raise InputError(
        f"{run} with another {name}, or with the same one: {value} cannot be compared with that of "
        f"another process, so that no run with it can be resumed; {advice}."
      )
    if was != value:
      raise InputError(
        f"{run} with {name} {shown(was)}, and this run has {shown(value)}; {advice}."
      )


def params_digest(params: Any) -> str:
  """Return a hash of the names, shapes and values of all parameters."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)}".encode())
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()[:16]


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]
