"""Reader of models of transformers: folders that `save_pretrained` wrote, and models in memory.

A folder contains `config.json`, one or several safetensors files, and possibly
`generation_config.json`. `families` has the names and the config of each family of models.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.checkpoint import Checkpoint, Generation
from specdec_jax.checkpoints.families import FAMILIES
from specdec_jax.checkpoints.families.mapping import read_eos_ids, require_known
from specdec_jax.checkpoints.formats import Leaf, read_safetensors
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config

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


def open_huggingface(folder: str) -> Checkpoint:
  """Open the checkpoint of a supported model that `save_pretrained` wrote as safetensors."""
  fields, file = files.read_json(folder, CONFIG), CONFIG
  tasks, settings = fields.get("task_specific_params"), fields
  if files.is_file(folder, _GENERATION):
    file, settings = _GENERATION, files.read_json(folder, _GENERATION)
  # Token ids in generation_config.json take precedence.
  ids = {name: settings[name] for name in _TOKENS if settings.get(name) is not None}
  generation = generation_of(file, settings, tasks)
  return open_state(folder, fields | ids, read_arrays(folder), generation)


def open_state(
  path: str, fields: Mapping[str, Any], state: Mapping[str, Any], generation: Generation
) -> Checkpoint:
  """Return the `Checkpoint` of a model of transformers, given its configuration and its arrays."""
  fields = {"model_type": None, **fields}
  require_known(path, fields, model_type=tuple(FAMILIES))
  family = FAMILIES[fields["model_type"]]
  config = family.config(path, fields)
  names = family.names(config)
  arrays: dict[str, Any] = {}
  for key, array in state.items():
    if re.fullmatch(family.UNUSED, key):
      continue
    key = key.removeprefix(family.PREFIX)
    name = names.get(key, key)  # unknown names are reported when shapes are checked
    array = array.T if len(array.shape) == 2 and name.endswith(family.TRANSPOSED) else array
    if name in arrays and not np.array_equal(arrays[name], array):
      raise InputError(
        f"{key} in {path} differs from another array there that is {name} too, according to its "
        "config."
      )
    arrays[name] = array
  config, leaves = family.convert(config, fields, arrays)
  if fields.get("eos_token_id") is None:  # T5Gemma may name it for the decoder only
    fields = fields.get("decoder") or {}
  eos_ids = read_eos_ids(fields, config.eos_id)
  return Checkpoint(path, config, leaves, eos_ids=eos_ids, generation=generation)


def read_arrays(folder: str) -> dict[str, Any]:
  """Return the arrays of a folder, memory-mapped, by name. Pickled files are not read."""
  if files.is_file(folder, WEIGHTS):
    parts = [WEIGHTS]
  elif files.is_file(folder, _INDEX):
    parts = sorted(set(files.read_json(folder, _INDEX)["weight_map"].values()))
  else:
    raise InputError(
      f"{folder} has neither {WEIGHTS} nor {_INDEX}; other formats, such as pickled weights, "
      "are not read: convert them with transformers' save_pretrained."
    )
  return {name: array for part in parts for name, array in read_safetensors(folder, part).items()}


def open_in_memory(model: Any) -> Checkpoint:
  """Return a model in memory as a checkpoint. Its arrays are copied when they are loaded.

  Args:
    model: a PyTorch model of transformers; or (config, parameters), with a `T5Config` or
      `GPTConfig` and a tree of parameters; or (config, state_dict), with a configuration of
      transformers (an object or a mapping) and the arrays by their names in transformers. Arrays
      are numpy arrays, JAX arrays or PyTorch tensors.
  """
  if hasattr(model, "state_dict"):
    config, arrays, kind = model.config, model.state_dict(), type(model)
  else:
    (config, arrays), kind = model, type(model[0])
  name = f"the {kind.__name__} in memory"
  if isinstance(config, T5Config | GPTConfig):
    flat = traverse_util.flatten_dict(dict(arrays), sep="/")
    leaves = {key: Leaf(_array(value)) for key, value in flat.items()}
    return Checkpoint(name, config, leaves, eos_ids=(config.eos_id,))
  fields = _fields(config)
  generation = getattr(model, "generation_config", None)
  settings = fields if generation is None else _fields(generation)
  generation = generation_of("its generation_config", settings, fields.get("task_specific_params"))
  state = {key: _array(value) for key, value in arrays.items()}
  return open_state(name, fields, state, generation)


def _fields(config: Any) -> dict[str, Any]:
  return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _array(value: Any) -> np.ndarray:
  if hasattr(value, "detach"):  # numpy has no bfloat16 of PyTorch
    value = value.detach().cpu().float().numpy()
  return np.asarray(value)


def generation_of(
  file: str, settings: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Any]] | None
) -> Generation:
  """Return the generation settings that change outputs, for the model and for each of its tasks."""
  of_tasks = {
    task: _effective(given) | {name: x for name, x in given.items() if name == "prefix"}
    for task, given in (tasks or {}).items()
  }
  return Generation(file, _effective(settings), of_tasks)


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
  neutral = dict(_NEUTRAL)
  if settings.get("num_beams") not in (None, 1):
    neutral |= _NEUTRAL_FOR_BEAMS
  if settings.get("do_sample"):
    neutral |= _NEUTRAL_FOR_SAMPLING
  given = {name: settings[name] for name in neutral if settings.get(name) not in (None, [])}
  return {name: value for name, value in given.items() if value != neutral[name]}
