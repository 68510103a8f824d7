"""Folders that transformers' `save_pretrained` wrote: `config.json`, and safetensors in one file
or several. What is the same for all its models."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from safetensors import SafetensorError, safe_open

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.stored import Stored
from specdec_jax.errors import InputError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # which file has which array
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def read_config(folder: str) -> dict[str, Any]:
  return _json(folder, CONFIG)


def require_known(folder: str, about: Mapping[str, Any], **known: tuple) -> None:
  """Raise InputError unless each field of config.json has one of its known values.

  The first of them is what a file that does not name the field means.
  """
  for field, values in known.items():
    if about.get(field, values[0]) not in values:
      raise InputError(
        f"{field} in {folder}/{CONFIG} is {about[field]!r}; it must be "
        f"{' or '.join(map(repr, values))} for a model that can be run here."
      )


def open_arrays(folder: str, unused: str) -> dict[str, Stored]:
  """All arrays of a folder under their own names, but for those whose name is `unused`, a regex.

  Raises:
    InputError: there are none but pickled ones, which are not read; or files are damaged or
      missing.
  """
  if files.is_file(folder, WEIGHTS):
    parts = [WEIGHTS]
  elif files.is_file(folder, _INDEX):
    parts = sorted(set(_json(folder, _INDEX).get("weight_map", {}).values()))
  else:
    raise InputError(
      f"{folder} has neither {WEIGHTS} nor {_INDEX}; other weights, pickled ones above all, are "
      "not read: convert them by transformers' save_pretrained."
    )
  return {k: x for part in parts for k, x in _arrays(folder, part, unused).items()}


def _arrays(folder: str, part: str, unused: str) -> dict[str, Stored]:
  """What one safetensors file has."""
  try:
    with files.local(folder, part) as path:
      opened = safe_open(path, framework="numpy")
  except (SafetensorError, OSError, ValueError) as error:
    raise InputError(f"{folder}/{part} is damaged or not there: {error}.") from error
  arrays = {}
  for name in opened.keys():
    if re.fullmatch(unused, name):
      continue
    values = opened.get_slice(name)
    dtype = _DTYPES.get(values.get_dtype())
    if dtype is None:
      raise InputError(
        f"{name} in {folder}/{part} is stored as {values.get_dtype()}; expected one of "
        f"{', '.join(_DTYPES)}."
      )
    arrays[name] = Stored(tuple(values.get_shape()), jnp.dtype(dtype), values.__getitem__)
  return arrays


def _json(folder: str, name: str) -> dict[str, Any]:
  try:
    with files.local(folder, name) as path, open(path, encoding="utf-8") as file:
      return dict(json.load(file))
  except (ValueError, TypeError, OSError) as error:
    raise InputError(f"{folder}/{name} is damaged: {error}.") from error
