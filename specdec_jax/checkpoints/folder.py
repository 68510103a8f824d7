"""This project's own small format: a folder with `config.json` and `params.msgpack`."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
from flax import serialization, traverse_util

from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config
from specdec_jax.models.t5 import init_params

_CONFIG, _PARAMS = "config.json", "params.msgpack"


def save_model(folder: str, config: T5Config, params) -> None:
  """Write shape and parameters (as bfloat16) to `folder`, each file whole or not at all."""
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  shape = dataclasses.asdict(config)
  del shape["dtype"], shape["dropout_rate"]
  params = jax.tree.map(lambda x: jax.device_get(x.astype(jnp.bfloat16)), params)
  for name, data in (
    (_PARAMS, serialization.msgpack_serialize(params)),
    (_CONFIG, (json.dumps(shape, indent=2) + "\n").encode()),
  ):
    part = path / (name + ".part")
    part.write_bytes(data)
    os.replace(part, path / name)


def load_model(folder: str, dtype: str = "float32"):
  """Read what `save_model` wrote: (config, params in `dtype`).

  Raises:
    InputError: no model there, or parameters that do not fit the shape (named).
  """
  path = pathlib.Path(folder)
  if not (path / _CONFIG).is_file() or not (path / _PARAMS).is_file():
    raise InputError(f"There is no model in {path}; expected {_CONFIG} and {_PARAMS} in it.")
  if dtype not in ("float32", "bfloat16"):
    raise InputError(f"dtype is {dtype!r}; use 'float32' or 'bfloat16'.")
  config = T5Config(**json.loads((path / _CONFIG).read_text()), dtype=jnp.dtype(dtype))
  params = serialization.msgpack_restore((path / _PARAMS).read_bytes())
  wanted = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  shapes = lambda tree: {k: v.shape for k, v in traverse_util.flatten_dict(tree, sep="/").items()}
  found, wanted = shapes(params), shapes(wanted)
  wrong = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
  if wrong:
    name = wrong[0]
    raise InputError(
      f"{path / _PARAMS} does not fit {_CONFIG}: {len(wrong)} arrays differ, the first is {name} "
      f"(found {found.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')})."
    )
  return config, jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
