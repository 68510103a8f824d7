"""This project's own small format: a folder with `config.json` and `params.msgpack`."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config, named_dtype
from specdec_jax.models.t5 import init_params

_CONFIG, _PARAMS = "config.json", "params.msgpack"


def save_model(folder: str, config: T5Config, params, vocabulary: str | None = None) -> None:
  """Write shape and parameters (as bfloat16) to `folder`, both files or neither.

  `vocabulary` is the fingerprint of the one it was trained with, kept to refuse another.
  """
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  shape = dataclasses.asdict(config)
  del shape["dtype"], shape["dropout_rate"]
  shape["vocabulary"] = vocabulary
  params = jax.tree.map(lambda x: jax.device_get(x.astype(jnp.bfloat16)), params)
  parts = {name: path / f"{name}.part" for name in (_PARAMS, _CONFIG)}
  try:
    parts[_PARAMS].write_bytes(serialization.msgpack_serialize(params))
    parts[_CONFIG].write_bytes((json.dumps(shape, indent=2) + "\n").encode())
    for name, part in parts.items():
      os.replace(part, path / name)
  finally:
    for part in parts.values():
      part.unlink(missing_ok=True)


def load_model(folder: str, dtype: str = "float32"):
  """Read what `save_model` wrote: (config, params in `dtype`).

  Raises:
    InputError: no model there, or parameters that do not fit the shape (named).
  """
  path = pathlib.Path(folder)
  if not (path / _CONFIG).is_file() or not (path / _PARAMS).is_file():
    raise InputError(f"There is no model in {path}; expected {_CONFIG} and {_PARAMS} in it.")
  kind = named_dtype(dtype)
  try:
    shape = json.loads((path / _CONFIG).read_text())
    shape.pop("vocabulary", None)
    config = T5Config(**shape, dtype=kind)
  except (ValueError, TypeError, AttributeError) as error:
    raise InputError(f"{path / _CONFIG} is not the shape of a model: {error}.") from error
  try:
    params = serialization.msgpack_restore((path / _PARAMS).read_bytes())
  except Exception as error:  # msgpack has many ways to say that a file is damaged
    raise InputError(f"{path / _PARAMS} is damaged or incomplete: {error}.") from error
  wanted = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  flat = lambda tree: traverse_util.flatten_dict(tree, sep="/") if isinstance(tree, dict) else {}
  shapes = lambda tree: {name: np.shape(array) for name, array in flat(tree).items()}
  found, wanted = shapes(params), shapes(wanted)
  wrong = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
  if wrong:
    name = wrong[0]
    raise InputError(
      f"{path / _PARAMS} does not fit {_CONFIG}: {len(wrong)} arrays differ, the first is {name} "
      f"(found {found.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')})."
    )
  return config, jax.tree.map(lambda x: jnp.asarray(x, kind), params)


def vocabulary_of(folder: str) -> str | None:
  """Fingerprint of the vocabulary that a saved model was trained with, if it was stated."""
  return json.loads((pathlib.Path(folder) / _CONFIG).read_text()).get("vocabulary")
