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
# Generation settings that change outputs, and the value that does not, as None and [] never do.
_NEUTRAL = {
  **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
  **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
  **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
  **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha"), 0),
  **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias"), None),
  **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), None),
  **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_strings"), None),
  **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), None),
  "do_sample": False,
}
_OF_BEAMS = {"length_penalty": 1.0, "early_stopping": False, "diversity_penalty": 0.0}
_OF_SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "typical_p": 1.0, "min_p": None}
_OF_SAMPLING |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def read_config(folder: str) -> dict[str, Any]:
  """config.json; of the ids that decoding goes by, generation_config.json has the last word."""
  about = _json(folder, CONFIG)
  stated = _generation_config(folder)
  return about | {name: stated[name] for name in _TOKENS if stated.get(name) is not None}


def read_eos_ids(folder: str, about: Mapping[str, Any], default: int) -> tuple[int, ...]:
  """eos_token_id of `read_config`'s fields: one id, or a list of which any ends a text."""
  value = about.get("eos_token_id", default)
  eos_ids = value if isinstance(value, list) and value else [value]
  for eos_id in eos_ids:
    require_count(_where(folder, "eos_token_id"), eos_id, 0)
  return tuple(dict.fromkeys(eos_ids))


def generation_settings(folder: str) -> tuple[str, dict[str, Any]]:
  """Return the settings in a folder that change what transformers' generate puts out.

  Left out are limits of length, which every call here gives, and `task_specific_params`, which
  transformers applies only in a pipeline.

  Returns:
    The name of the file, generation_config.json or where there is none config.json, and the
    settings in it that differ from their neutral values.
  """
  file = _GENERATION if files.is_file(folder, _GENERATION) else CONFIG
  stated, neutral = _json(folder, file), dict(_NEUTRAL)
  if stated.get("num_beams") not in (None, 1):
    neutral |= _OF_BEAMS
  if stated.get("do_sample"):
    neutral |= _OF_SAMPLING
  of = {name: stated[name] for name in neutral if stated.get(name) not in (None, [])}
  return file, {name: value for name, value in of.items() if value != neutral[name]}


def _generation_config(folder: str) -> dict[str, Any]:
  return _json(folder, _GENERATION) if files.is_file(folder, _GENERATION) else {}


def _where(folder: str, field: str) -> str:
  """A field, and the file whose value of it counts, for messages."""
  generates = field in _TOKENS and _generation_config(folder).get(field) is not None
  return f"{field} in {folder}/{_GENERATION if generates else CONFIG}"


def require_known(folder: str, about: Mapping[str, Any], **known: tuple) -> None:
  """Raise InputError unless each field of `read_config`'s has one of its known values.

  The first of them is what a file that does not name the field means.
  """
  for field, values in known.items():
    if about.get(field, values[0]) not in values:
      raise InputError(
        f"{_where(folder, field)} is {about[field]!r}; it must be "
        f"{' or '.join(map(repr, values))} for a model that can be run here."
      )


def require_sizes(folder: str, about: Mapping[str, Any], *fields: str, least: int = 1) -> None:
  """Raise InputError unless each field of config.json is a whole number that arrays can have."""
  for field in fields:
    require_count(_where(folder, field), about.get(field), least)


def open_arrays(folder: str, unused: str, rename: Callable[[str], str]) -> dict[str, Stored]:
  """All arrays of a folder under our names, but for those whose own name is `unused`, a regex.

  Raises:
    InputError: there are none but pickled ones, which are not read; files are damaged or missing;
      an array is not in the file that the index names; or what we take for one array is there
      several times, and not the same.
  """
  where: dict[str, str] = {}
  if files.is_file(folder, WEIGHTS):
    parts = [WEIGHTS]
  elif files.is_file(folder, _INDEX):
    where = _weight_map(folder)
    parts = sorted(set(where.values()))
  else:
    raise InputError(
      f"{folder} has neither {WEIGHTS} nor {_INDEX}; other weights, pickled ones above all, are "
      "not read: convert them by transformers' save_pretrained."
    )
  found = {part: _arrays(folder, part, unused) for part in parts}
  for name, part in where.items():
    if name not in found[part] and not re.fullmatch(unused, name):
      others = [other for other in parts if name in found[other]]
      raise InputError(
        f"{folder}/{_INDEX} places {name} in {part}, which does not have it"
        + (f"; {', '.join(others)} has it" if others else ", nor has another file")
        + ": files of two models may be mixed up here, or some are missing. Copy all of them anew."
      )
  arrays: dict[str, Stored] = {}
  for part in parts:
    for name, array in found[part].items():
      ours = rename(name)
      if ours in arrays and not equal(arrays[ours], array):
        raise InputError(
          f"{name} in {folder}/{part} differs from another array there that is {ours} too; take "
          "out the one that is not meant."
        )
      arrays[ours] = array
  return arrays


def _weight_map(folder: str) -> dict[str, str]:
  """The file of each array, as the index has it; none of them may lie elsewhere."""
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
  return where


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
