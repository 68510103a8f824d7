"""Folders that transformers' `save_pretrained` wrote: `config.json`, and safetensors in one file
or several. What is the same for all its models."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from safetensors import SafetensorError, safe_open

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.stored import Stored, equal
from specdec_jax.errors import InputError, require_count

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # which file has which array
_GENERATION = "generation_config.json"
_TOKENS = "decoder_start_token_id", "eos_token_id", "pad_token_id"
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def read_config(folder: str) -> dict[str, Any]:
  """config.json; of the ids that decoding goes by, generation_config.json has the last word."""
  about = _json(folder, CONFIG)
  if files.is_file(folder, _GENERATION):
    stated = _json(folder, _GENERATION)
    about |= {name: stated[name] for name in _TOKENS if stated.get(name) is not None}
  match about.get("eos_token_id"):
    case [eos_id]:
      about["eos_token_id"] = eos_id
  return about


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


def require_sizes(folder: str, about: Mapping[str, Any], *fields: str, least: int = 1) -> None:
  """Raise InputError unless each field of config.json is a whole number that arrays can have."""
  for field in fields:
    require_count(f"{field} in {folder}/{CONFIG}", about.get(field), least)


def open_arrays(folder: str, unused: str, rename: Callable[[str], str]) -> dict[str, Stored]:
  """All arrays of a folder under our names, but for those whose own name is `unused`, a regex.

  Raises:
    InputError: there are none but pickled ones, which are not read; files are damaged or missing;
      or what we take for one array is there several times, and not the same.
  """
  if files.is_file(folder, WEIGHTS):
    parts = [WEIGHTS]
  elif files.is_file(folder, _INDEX):
    parts = _parts(folder)
  else:
    raise InputError(
      f"{folder} has neither {WEIGHTS} nor {_INDEX}; other weights, pickled ones above all, are "
      "not read: convert them by transformers' save_pretrained."
    )
  arrays: dict[str, Stored] = {}
  for part in parts:
    for name, array in _arrays(folder, part, unused).items():
      ours = rename(name)
      if ours in arrays and not equal(arrays[ours], array):
        raise InputError(
          f"{name} in {folder}/{part} differs from another array there that is {ours} too; take "
          "out the one that is not meant."
        )
      arrays[ours] = array
  return arrays


def _parts(folder: str) -> list[str]:
  """The files that the index names; none of them may lie elsewhere."""
  where = _json(folder, _INDEX).get("weight_map")
  if not isinstance(where, dict):
    raise InputError(
      f"weight_map in {folder}/{_INDEX} is a {type(where).__name__}; expected the file of each "
      "array by its name."
    )
  for name, part in where.items():
    if not isinstance(part, str) or not re.fullmatch(r"[\w.-]+\.safetensors", part):
      raise InputError(
        f"weight_map in {folder}/{_INDEX} gives {part!r} for {name}; expected the name of a "
        "safetensors file in that folder."
      )
  return sorted(set(where.values()))


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
      read = json.load(file)
  except (ValueError, RecursionError, OSError) as error:
    raise InputError(f"{folder}/{name} is damaged: {error}.") from error
  if not isinstance(read, dict):
    found = type(read).__name__
    raise InputError(f"{folder}/{name} is damaged: it holds a {found}, not fields by name.")
  return read
