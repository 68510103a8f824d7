"""Reader of folders that transformers' `save_pretrained` wrote, for models of any family.

A folder contains `config.json`, one or several safetensors files, and possibly
`generation_config.json`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from safetensors import SafetensorError, safe_open

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.stored import Generation, StoredArray, equal
from specdec_jax.errors import InputError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # says in which file each array is
_GENERATION = "generation_config.json"
_TOKENS = "decoder_start_token_id", "eos_token_id", "pad_token_id"
# Generation settings that change outputs, with their neutral values. None and [] are neutral too.
_NEUTRAL: dict[str, Any] = {
  "max_length": 20,  # the default of transformers, which older versions wrote into each file
  "max_new_tokens": None,
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
_NEUTRAL_FOR_BEAMS = {"length_penalty": 1.0, "early_stopping": False, "diversity_penalty": 0.0}
_NEUTRAL_FOR_SAMPLING = {
  "temperature": 1.0,
  "top_k": None,
  "top_p": 1.0,
  "typical_p": 1.0,
  "min_p": None,
}
_NEUTRAL_FOR_SAMPLING |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


def read_config(folder: str) -> dict[str, Any]:
  """Return the fields of config.json; token ids in generation_config.json take precedence."""
  fields = _json(folder, CONFIG)
  generation = _generation_config(folder)
  ids = {name: generation[name] for name in _TOKENS if generation.get(name) is not None}
  return fields | ids


def read_eos_ids(fields: Mapping[str, Any], default: int) -> tuple[int, ...]:
  """Return the ids in the field `eos_token_id`; each of them ends a text.

  Args:
    fields: fields of the config, such as the result of `read_config`.
    default: id to return if the field is missing.
  """
  value = fields.get("eos_token_id", default)
  eos_ids = value if isinstance(value, list) and value else [value]
  return tuple(dict.fromkeys(eos_ids))


def read_generation(folder: str) -> Generation:
  """Return the generation settings of the model in a folder."""
  file = _GENERATION if files.is_file(folder, _GENERATION) else CONFIG
  tasks = _json(folder, CONFIG).get("task_specific_params")
  return generation_of(file, _json(folder, file), tasks)


def generation_of(
  file: str, settings: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Any]] | None
) -> Generation:
  """Return the generation settings that change outputs, for the model and for each of its tasks.

  Args:
    file: source of `settings`, for messages (`Generation.file`).
    settings: all generation settings of the model.
    tasks: field `task_specific_params` of config.json.
  """
  of_tasks = {
    task: _effective(given) | {name: x for name, x in given.items() if name == "prefix"}
    for task, given in (tasks or {}).items()
  }
  return Generation(file, _effective(settings), of_tasks)


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings that apply and differ from their neutral values.

  Settings of beam search apply with more than one beam, and settings of sampling with `do_sample`.
  """
  neutral = dict(_NEUTRAL)
  if settings.get("num_beams") not in (None, 1):
    neutral |= _NEUTRAL_FOR_BEAMS
  if settings.get("do_sample"):
    neutral |= _NEUTRAL_FOR_SAMPLING
  given = {name: settings[name] for name in neutral if settings.get(name) not in (None, [])}
  return {name: value for name, value in given.items() if value != neutral[name]}


def _generation_config(folder: str) -> dict[str, Any]:
  return _json(folder, _GENERATION) if files.is_file(folder, _GENERATION) else {}


def require_known(folder: str, fields: Mapping[str, Any], **known: tuple) -> None:
  """Raise InputError unless each field has one of its supported values.

  Args:
    folder: folder of the model, for messages.
    fields: fields of the config, such as the result of `read_config`.
    **known: supported values of each field. The first one is the default of a missing field.
  """
  for field, values in known.items():
    if fields.get(field, values[0]) not in values:
      raise InputError(
        f"{field} in {folder}/{CONFIG} is {fields[field]!r}; it must be "
        f"{' or '.join(map(repr, values))} for a supported model."
      )


def open_arrays(folder: str, unused: str, rename: Callable[[str], str]) -> dict[str, StoredArray]:
  """Return the arrays of a model in a folder, by their names in this package.

  Args:
    folder: folder of the model.
    unused: regular expression for arrays to leave out; it must match the whole name in the file.
    rename: function from a name in the files to a name in this package.

  Raises:
    InputError: the folder has no safetensors file (pickled files are not read); files are damaged
      or missing; an array has an unsupported dtype; or two arrays are renamed to the same name but
      have different values.
  """
  if files.is_file(folder, WEIGHTS):
    parts = [WEIGHTS]
  elif files.is_file(folder, _INDEX):
    parts = sorted(set(_json(folder, _INDEX)["weight_map"].values()))
  else:
    raise InputError(
      f"{folder} has neither {WEIGHTS} nor {_INDEX}; other formats, such as pickled weights, "
      "are not read: convert them with transformers' save_pretrained."
    )
  arrays: dict[str, StoredArray] = {}
  for part in parts:
    for name, array in _arrays(folder, part, unused).items():
      our_name = rename(name)
      if our_name in arrays and not equal(arrays[our_name], array):
        raise InputError(
          f"{name} in {folder}/{part} differs from another array there that is {our_name} too; "
          "remove the wrong one."
        )
      arrays[our_name] = array
  return arrays


def _arrays(folder: str, part: str, unused: str) -> dict[str, StoredArray]:
  """Return the arrays of a safetensors file by name, without those whose names match `unused`."""
  try:
    with files.local_copy(folder, part) as path:
      opened = safe_open(path, framework="numpy")
  except (SafetensorError, OSError, ValueError) as error:
    raise InputError(f"{folder}/{part} is damaged or missing: {error}.") from error
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
    arrays[name] = StoredArray(tuple(values.get_shape()), jnp.dtype(dtype), values.__getitem__)
  return arrays


def _json(folder: str, name: str) -> dict[str, Any]:
  try:
    with files.local_copy(folder, name) as path, open(path, encoding="utf-8") as file:
      return json.load(file)
  except ValueError as error:
    raise InputError(f"{folder}/{name} is damaged: {error}.") from error
