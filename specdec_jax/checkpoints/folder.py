"""This project's own small format: a folder with `config.json` and `params.msgpack`."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
from flax import serialization

from specdec_jax.atomic_files import atomic_write
from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.flax_msgpack import read_flat
from specdec_jax.checkpoints.stored import Checkpoint, Stored
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config, named_dtype
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.speculator import SpeculatorConfig

CONFIG, PARAMS = "config.json", "params.msgpack"
_FAMILIES: dict[str, type[AnyConfig]] = {
  "t5": T5Config,
  "gpt": GPTConfig,
  "speculator": SpeculatorConfig,
}


def save_model(folder: str, config: AnyConfig, params, vocabulary: str | None = None) -> None:
  """Write shape and parameters (as bfloat16) to `folder`, both files or neither.

  `vocabulary` is the fingerprint of the one it was trained with, kept to refuse another.
  """
  if config.kernels != "xla":
    raise InputError("Parameters in panels (`kernels.skinny`) are for decoding; save those read.")
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  shape = dataclasses.asdict(config)
  for how_it_runs in ("kernels", "dtype", "dropout_rate"):
    del shape[how_it_runs]
  shape["vocabulary"] = vocabulary
  shape["family"] = next(name for name, kind in _FAMILIES.items() if isinstance(config, kind))
  params = jax.tree.map(lambda x: jax.device_get(x.astype(jnp.bfloat16)), params)
  with atomic_write(path / CONFIG) as about, atomic_write(path / PARAMS, "wb") as arrays:
    arrays.write(serialization.msgpack_serialize(params))
    about.write(json.dumps(shape, indent=2) + "\n")


def open_folder(folder: str) -> Checkpoint:
  """What `save_model` wrote.

  Raises:
    InputError: no model there, or one that is damaged.
  """
  if not files.is_file(folder, CONFIG) or not files.is_file(folder, PARAMS):
    raise InputError(f"There is no model in {folder}; expected {CONFIG} and {PARAMS} in it.")
  try:
    with files.local(folder, CONFIG) as path:
      shape = json.loads(pathlib.Path(path).read_text())
    vocabulary = shape.pop("vocabulary", None)
    config = _FAMILIES[shape.pop("family", "t5")](**shape)
  except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
    reason = str(error).removesuffix(".")
    raise InputError(f"{folder}/{CONFIG} is not the shape of a model: {reason}.") from error
  saved = read_flat(folder, PARAMS)
  arrays = {name: value for name, value in saved.items() if isinstance(value, Stored)}
  return Checkpoint(folder, config, arrays, vocabulary)


def load_model(folder: str, dtype: str = "float32"):
  """Read what `save_model` wrote, as it lies there: (config, params in `dtype`).

  Raises:
    InputError: no model there, or parameters that do not fit the shape (named).
  """
  checkpoint = open_folder(folder)
  config = dataclasses.replace(checkpoint.config, dtype=named_dtype(dtype))
  return config, checkpoint.load(config)
