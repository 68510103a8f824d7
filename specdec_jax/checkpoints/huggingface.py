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
from specdec_jax.checkpoints.families import FAMILIES, whisper
from specdec_jax.checkpoints.families.mapping import read_eos_ids, require_known
from specdec_jax.checkpoints.formats import Leaf, read_safetensors
from specdec_jax.core.generation_config import SETTINGS
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # says in which file each array is
_GENERATION = "generation_config.json"
_ADAPTER = "adapter_config.json"
_TOP_K = 50  # default of transformers where a checkpoint samples
_OF_TEXTS = "decoder_start_token_id", "eos_token_id"  # those of generation_config.json come first
_TOKENS = (*_OF_TEXTS, "pad_token_id")
_FORCED_EOS = {"bart": 2, "mbart": 2, "pegasus": 1, "marian": 0}  # defaults of config.json
# Settings of `generate` that are not supported; config.json may have them next to other fields.
_UNSUPPORTED = (
  *("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "penalty_alpha"),
  *("guidance_scale", "exponential_decay_length_penalty", "max_time", "forced_decoder_ids"),
  *("watermarking_config", "token_healing", "dola_layers", "top_h"),
)
# Fields of generation_config.json that do not change outputs, or that are read elsewhere.
_IGNORED = re.compile(
  r"_.*|.*cache.*|output_.*|return_dict.*|.*assistant.*|.*_lookbehind|.*compile.*|bos_token_id|"
  r"prompt_lookup_num_tokens|max_matching_ngram_size|speculation_type|use_mtp|prefill_chunk_size|"
  r"low_memory|continuous_batching_config|remove_invalid_values|transformers_version"
)


def open_huggingface(folder: str) -> Checkpoint:
  """Open the checkpoint of a supported model that `save_pretrained` wrote as safetensors."""
  if files.is_file(folder, _ADAPTER):
    raise InputError(
      f"{folder} has an adapter next to the model ({_ADAPTER}), which transformers would apply; "
      "merge it into the model (merge_and_unload of peft) and save that, or remove the file."
    )
  fields, generation = files.read_json(folder, CONFIG), None
  if files.is_file(folder, _GENERATION):
    generation = files.read_json(folder, _GENERATION)
  return open_state(folder, fields, read_arrays(folder), generation)


def read_config(folder: str) -> Any:
  """Return the configuration of a model in a folder, of which only config.json is read."""
  fields = {"model_type": None, **files.read_json(folder, CONFIG)}
  require_known(folder, fields, model_type=tuple(FAMILIES))
  return FAMILIES[fields["model_type"]].config(folder, fields)


def open_state(
  path: str,
  fields: Mapping[str, Any],
  state: Mapping[str, Any],
  generation: Mapping[str, Any] | None = None,
) -> Checkpoint:
  """Return the `Checkpoint` of a model of transformers, given its configuration and its arrays.

  `generation` has the fields of generation_config.json. Its start and EOS take precedence; padding
  is that of the configuration, which also determines the positions of some models. If it is None,
  generation settings are those in `fields`.
  """
  fields = {"model_type": None, **fields}
  require_known(path, fields, model_type=tuple(FAMILIES))
  family = FAMILIES[fields["model_type"]]
  speech = None
  if family is whisper:  # its settings of prompts are no settings of `generate` here
    named = {**fields, **(generation or {})}
    fields = {name: x for name, x in fields.items() if name not in whisper.SPEECH}
    if generation is not None:
      generation = {name: x for name, x in generation.items() if name not in whisper.SPEECH}
  settings = generation_of(fields, generation)
  fields |= {name: x for name in _OF_TEXTS if (x := (generation or {}).get(name)) is not None}
  config = family.config(path, fields)
  if family is whisper:
    speech = whisper.tokens(named | {"decoder_start_token_id": config.start_id})
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
  return Checkpoint(path, config, leaves, eos_ids=eos_ids, generation=settings, speech=speech)


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
  generation = None if generation is None else _fields(generation)
  state = {key: _array(value) for key, value in arrays.items()}
  return open_state(name, fields, state, generation)


def _fields(config: Any) -> dict[str, Any]:
  return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _array(value: Any) -> np.ndarray:
  if hasattr(value, "detach"):  # numpy has no bfloat16 of PyTorch
    value = value.detach().cpu().float().numpy()
  return np.asarray(value)


def generation_of(fields: Mapping[str, Any], generation: Mapping[str, Any] | None) -> Generation:
  """Return the generation settings of a model and of its tasks; see `open_state`."""
  if generation is None:
    forced_eos = _FORCED_EOS.get(fields["model_type"])
    fields = {"bos_token_id": 0, "forced_eos_token_id": forced_eos, **fields}
    generation = {name: fields.get(name) for name in (*SETTINGS, *_UNSUPPORTED)}
    if fields.get("force_bos_token_to_be_generated"):
      generation["forced_bos_token_id"] = fields["bos_token_id"]
  settings = {
    name: value
    for name, value in generation.items()
    if value not in (None, [])
    and name not in _TOKENS
    and not _IGNORED.fullmatch(name)
    and (name, value) != ("max_length", 20)  # the default, which transformers 4 wrote into files
  }
  do_sample = {"do_sample": settings.get("do_sample", False)}

  def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the defaults of transformers that depend on them."""
    given = (do_sample if "temperature" in given else {}) | dict(given)
    samples = given.get("do_sample") and settings.get("top_k") is None
    return ({"top_k": _TOP_K} if samples else {}) | given

  tasks = fields.get("task_specific_params") or {}
  return Generation(completed(settings), {task: completed(given) for task, given in tasks.items()})
