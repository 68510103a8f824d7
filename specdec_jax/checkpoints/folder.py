"""This project's checkpoint format: a folder with `config.json` and `params.msgpack`."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
from flax import serialization

from specdec_jax.checkpoints import files
from specdec_jax.checkpoints.flax_msgpack import read_flat
from specdec_jax.checkpoints.stored import Checkpoint, StoredArray
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.drafts.heads import AnyConfig, SpeculatorConfig
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config, named_dtype

CONFIG, PARAMS = "config.json", "params.msgpack"
_FAMILIES: dict[str, type[AnyConfig]] = {
  "t5": T5Config,
  "gpt": GPTConfig,
  "speculator": SpeculatorConfig,
}
# Kinds of learned draft heads that have been renamed since checkpoints were written.
_RENAMED_KINDS = {
  "look_ahead": "pass",
  "exit": "early_exit",
  "decoder": "shared_encoder",
  "anchored": "conditioned",
}


def save_model(folder: str, config: AnyConfig, params, vocabulary: str | None = None) -> None:
  """Write the config of a model, and its parameters in bfloat16, to `folder`.

  Either both files are written or neither.

  Args:
    folder: folder to write to; created if it does not exist.
    config: config of the model.
    params: parameters of the model, not packed in panels (`kernels.skinny`).
    vocabulary: fingerprint of the vocabulary that the model was trained with; None if unknown. When
      a pair loads the model, this fingerprint is compared with that of the pair's vocabulary.

  Raises:
    InputError: the parameters are packed in panels.
  """
  if config.kernels != "xla":
    raise InputError(
      "Parameters packed in panels (`kernels.skinny`) cannot be saved; save them before packing."
    )
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  fields = dataclasses.asdict(config)
  for name in ("kernels", "dtype", "dropout_rate"):  # these do not describe the parameters
    del fields[name]
  fields["vocabulary"] = vocabulary
  fields["family"] = next(name for name, kind in _FAMILIES.items() if isinstance(config, kind))
  params = jax.tree.map(lambda x: jax.device_get(x.astype(jnp.bfloat16)), params)
  with atomic_write(path / CONFIG) as config_file, atomic_write(path / PARAMS, "wb") as params_file:
    params_file.write(serialization.msgpack_serialize(params))
    config_file.write(json.dumps(fields, indent=2) + "\n")


def open_folder(folder: str) -> Checkpoint:
  """Open a model that `save_model` wrote.

  Raises:
    InputError: the folder contains no model, or its parameters are damaged.
  """
  if not files.is_file(folder, CONFIG) or not files.is_file(folder, PARAMS):
    raise InputError(f"There is no model in {folder}; expected {CONFIG} and {PARAMS} in it.")
  with files.local_copy(folder, CONFIG) as path:
    fields = json.loads(pathlib.Path(path).read_text())
  vocabulary = fields.pop("vocabulary", None)
  if "kind" in fields:
    fields["kind"] = _RENAMED_KINDS.get(fields["kind"], fields["kind"])
  config = _FAMILIES[fields.pop("family", "t5")](**fields)
  values = read_flat(folder, PARAMS)
  arrays = {name: value for name, value in values.items() if isinstance(value, StoredArray)}
  return Checkpoint(folder, config, arrays, vocabulary)


def load_model(folder: str, dtype: str = "float32"):
  """Return the config and the parameters, in `dtype`, of a model that `save_model` wrote.

  Raises:
    InputError: the folder contains no model, or its parameters do not fit the config.
  """
  checkpoint = open_folder(folder)
  config = dataclasses.replace(checkpoint.config, dtype=named_dtype(dtype))
  return config, checkpoint.load(config)
