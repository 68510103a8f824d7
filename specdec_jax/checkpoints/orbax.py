"""Reader of Orbax checkpoints that contain parameters or a train state."""

import json

from specdec_jax.checkpoints.files import kvstore, local_copy
from specdec_jax.checkpoints.stored import Checkpoint, infer_config, select_params
from specdec_jax.checkpoints.zarr import open_arrays

METADATA = "_METADATA"


def open_orbax(folder: str) -> Checkpoint:
  """Open a T5 checkpoint that `StandardCheckpointer` or `PyTreeCheckpointer` wrote.

  Tensorstore reads the arrays, because Orbax would restore the whole train state.

  Raises:
    InputError: the checkpoint contains no T5.
  """
  with local_copy(folder, METADATA) as path, open(path, encoding="utf-8") as file:
    metadata = json.load(file)
  keys = [
    [str(key["key"]) for key in leaf["key_metadata"]] for leaf in metadata["tree_metadata"].values()
  ]
  zarr = "zarr3" if metadata.get("use_zarr3") else "zarr"
  base = kvstore(folder)

  def spec(name: str) -> dict:
    if metadata.get("use_ocdbt", True):
      store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
      store = {**base, "path": base["path"] + f"{name}/"}
    return {"driver": zarr, "kvstore": store}

  specs = select_params(folder, {"/".join(key): spec(".".join(key)) for key in keys})
  arrays = open_arrays(folder, specs)
  return Checkpoint(folder, infer_config(folder, arrays), arrays)
