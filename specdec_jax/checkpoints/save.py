"""Writers of checkpoints, in this project's format and in that of Hugging Face.

The format of this project is a folder with `config.json` and `params.msgpack`.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
from flax import serialization, traverse_util
from safetensors.numpy import save

from specdec_jax import registry
from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.checkpoint import Checkpoint
from specdec_jax.checkpoints.families import t5
from specdec_jax.checkpoints.formats import Leaf, read_msgpack
from specdec_jax.checkpoints.huggingface import WEIGHTS
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config
from specdec_jax.models.layout import Layout

CONFIG, PARAMS = "config.json", "params.msgpack"
_FAMILIES = {"t5": T5Config, "gpt": GPTConfig}


def save_model(
  folder: str, config: Any, params: Any, vocabulary: str | None = None, dtype: Any = None
) -> None:
  """Write the config and the parameters of a model to `folder`: both files or neither.

  Args:
    vocabulary: fingerprint of the vocabulary that the model was trained with; None if unknown. When
      a pair loads the model, this fingerprint is compared with that of the pair's vocabulary.
    dtype: dtype of floating-point parameters in the file; by default, that of each array.
  """
  if (kernels := config.layout.kernels) != "xla":
    raise InputError(
      f"Parameters in the layout of kernels {kernels!r} cannot be saved; use those of 'xla'."
    )
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  fields = dataclasses.asdict(config)
  weights = config.layout.weights if config.layout.is_quantized else "float"
  del fields["layout"], fields["dropout_rate"]  # of which only these describe the parameters:
  fields |= {"fused": config.layout.fused, "weights": weights}
  fields["vocabulary"] = vocabulary
  families = [name for name, kind in _FAMILIES.items() if isinstance(config, kind)]
  fields["family"] = families[0] if families else "head"

  def stored(x: Any) -> np.ndarray:
    is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    return jax.device_get(x.astype(dtype) if dtype and is_float else x)

  params = jax.tree.map(stored, params)
  with atomic_write(path / CONFIG) as config_file, atomic_write(path / PARAMS, "wb") as params_file:
    params_file.write(serialization.msgpack_serialize(params))
    config_file.write(json.dumps(fields, indent=2) + "\n")


def open_folder(folder: str) -> Checkpoint:
  """Open a model that `save_model` wrote."""
  fields = files.read_json(folder, CONFIG)
  vocabulary = fields.pop("vocabulary", None)
  is_head = (family := fields.pop("family", "t5")) == "head"
  config_type: Any = registry.head(fields["kind"]) if is_head else _FAMILIES[family]
  layout = Layout(fused=fields.pop("fused", False), weights=fields.pop("weights", "float"))
  lists = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}  # JSON has lists
  config = config_type(**fields | lists, layout=layout)
  values = read_msgpack(folder, PARAMS)
  leaves = {name: Leaf(value) for name, value in values.items() if hasattr(value, "shape")}
  eos_ids = () if is_head else (config.eos_id,)
  return Checkpoint(folder, config, leaves, vocabulary, eos_ids)


def save_huggingface(folder: str, config: T5Config, params: Any) -> None:
  """Write a T5 to `folder` as transformers' `save_pretrained` does, in the dtype of its parameters.

  Padding of the embedding table becomes part of the vocabulary. Either both files are written or
  neither. The layout of `config` must not be `fused`.
  """
  fields = t5.fields_of(config)
  read = t5.config(folder, fields)  # raises InputError for another kind of feed-forward blocks
  unread = "vocab_size", "padded_vocab_size", "dropout_rate"
  read = dataclasses.replace(read, **{name: getattr(config, name) for name in unread})
  others = [
    f"{name} {value!r}" for name, value in vars(config).items() if value != vars(read)[name]
  ]
  if others:
    raise InputError(
      f"A model with {', '.join(others)} cannot be written for transformers as a T5."
    )
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  # Of the names of the embedding table, the first one is written.
  names = {ours: theirs for theirs, ours in reversed(t5.names(config).items())}
  arrays = {}
  for name, value in traverse_util.flatten_dict(params, sep="/").items():
    array = np.asarray(value)
    array = array.T if array.ndim == 2 and name.endswith(t5.TRANSPOSED) else array
    arrays[names[name]] = np.ascontiguousarray(array)
  with atomic_write(path / CONFIG) as config_file, atomic_write(path / WEIGHTS, "wb") as weights:
    weights.write(save(arrays, {"format": "pt"}))
    config_file.write(json.dumps(fields, indent=2) + "\n")
