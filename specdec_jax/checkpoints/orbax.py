"""Orbax's checkpoints: parameters alone, or a train state that holds them."""

import json

from specdec_jax.checkpoints.files import kvstore, local
from specdec_jax.checkpoints.stored import Checkpoint, inferred_config, parameters
from specdec_jax.checkpoints.zarr import open_arrays
from specdec_jax.errors import InputError

METADATA = "_METADATA"


def open_orbax(folder: str) -> Checkpoint:
  """What `StandardCheckpointer` or `PyTreeCheckpointer` wrote to `folder`.

  Only the parameters are opened, by tensorstore: Orbax restores a tree as a whole.

  Raises:
    InputError: it is damaged, or holds no T5.
  """
  try:
    with local(folder, METADATA) as path, open(path, encoding="utf-8") as file:
      metadata = json.load(file)
    keys = [
      [str(key["key"]) for key in leaf["key_metadata"]]
      for leaf in metadata["tree_metadata"].values()
    ]
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
    raise InputError(f"{folder}/{METADATA} is damaged: {error!r}.") from error
  zarr = "zarr3" if metadata.get("use_zarr3") else "zarr"
  base = kvstore(folder)

  def spec(name: str) -> dict:
    if metadata.get("use_ocdbt", True):
      store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
      store = {**base, "path": base["path"] + f"{name}/"}
    return {"driver": zarr, "kvstore": store}

  found = parameters(folder, {"/".join(key): spec(".".join(key)) for key in keys})
  arrays = open_arrays(folder, found)
  return Checkpoint(folder, inferred_config(folder, arrays), arrays)
