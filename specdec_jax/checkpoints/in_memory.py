"""Models in memory as checkpoints: models of transformers, and parameters of this package."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from specdec_jax.checkpoints.huggingface import open_state
from specdec_jax.checkpoints.stored import Checkpoint, StoredArray
from specdec_jax.models.config import GPTConfig, T5Config


def is_in_memory(model: Any) -> bool:
  """Return whether `model` has a `state_dict` or is a pair, as `open_in_memory` requires."""
  return hasattr(model, "state_dict") or (isinstance(model, tuple) and len(model) == 2)


def open_in_memory(model: Any) -> Checkpoint:
  """Return a model in memory as a checkpoint. Its arrays are copied when they are loaded.

  Args:
    model: a PyTorch model of transformers; or (config, parameters), with a `T5Config` or
      `GPTConfig` and a tree of parameters; or (config, state_dict), with a configuration of
      transformers (an object or a mapping) and the arrays by their names in transformers. Arrays
      are numpy arrays, JAX arrays or PyTorch tensors.

  Raises:
    InputError: the model is not supported.
  """
  name = type(model).__name__
  if hasattr(model, "state_dict"):
    config, arrays = model.config, model.state_dict()
  else:
    config, arrays = model
    name = type(config).__name__
  name = f"the {name} in memory"
  if isinstance(config, T5Config | GPTConfig):
    flat = traverse_util.flatten_dict(dict(arrays), sep="/")
    return Checkpoint(name, config, {key: _array(value) for key, value in flat.items()})
  fields = _fields(config)
  generation = getattr(model, "generation_config", None)
  settings = fields if generation is None else _fields(generation)
  stored = {key: _array(value) for key, value in arrays.items()}
  return open_state(name, fields, stored, settings)


def _fields(config: Any) -> dict[str, Any]:
  """Return the fields of a configuration of transformers."""
  return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _array(value: Any) -> StoredArray:
  """Return a numpy, JAX or PyTorch array as a `StoredArray`; PyTorch's is converted to float32."""
  if hasattr(value, "detach"):  # numpy has no bfloat16 of PyTorch
    value = value.detach().cpu().float().numpy()
  array = np.asarray(value)
  return StoredArray(array.shape, array.dtype, array.__getitem__)
