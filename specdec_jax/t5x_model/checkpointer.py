"""Checkpoints of the target and of the draft, restored as one train state."""

from flax import core
from t5x import checkpoints

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.errors import InputError

DRAFT = "draft"  # name of the draft's tree, beside the target's encoder and decoder


class PairCheckpointer:
  """Reads the target from where t5x says and the draft from `draft_path`.

  t5x makes it through `RestoreCheckpointConfig`: as `checkpoint_manager_cls`, or, with
  `use_orbax = False`, as `checkpointer_cls`. Either way both formats that T5X writes are read.
  """

  def __init__(self, *, train_state, partitioner, draft_path: str, restore_dtype=None, **_):
    """What t5x gives (all else concerns saving), and the folder of the draft's checkpoint."""
    self._train_state = train_state
    self._partitioner = partitioner
    self._draft_path = draft_path
    self._restore_dtype = restore_dtype

  def restore(self, path: str, **kwargs):
    """The train state with parameters of both; arguments are t5x's and concern the target.

    Raises:
      InputError: a checkpoint is not there, or not of its network's shape, which Orbax would cut
        and pad without a word. Not so with transformations, which may say what else it holds.
    """
    params, draft_params = core.pop(self._train_state.params, DRAFT)
    axes, draft_axes = core.pop(self._train_state.params_axes, DRAFT)
    if not kwargs.get("state_transformation_fns"):
      require_shapes("target", path, params)
    require_shapes(DRAFT, self._draft_path, draft_params)
    target = self._restore(path, params, axes, **kwargs)
    draft = self._restore(self._draft_path, draft_params, draft_axes)
    both = core.freeze({**target.params, DRAFT: draft.params})
    return target.replace(params=both, params_axes=self._train_state.params_axes)

  def _restore(self, path: str, params, params_axes, **kwargs):
    state = self._train_state.replace(params=params, params_axes=params_axes)
    # Knows both formats, whatever its name says.
    manager = checkpoints.OrbaxCheckpointManagerInterface(
      path, state, self._partitioner, restore_dtype=self._restore_dtype
    )
    return manager.restore(path=path, **kwargs)


def require_shapes(role: str, path: str, params) -> None:
  """Raise InputError unless a checkpoint holds just such parameters as those of a network."""
  try:
    open_checkpoint(path).require_shapes(core.unfreeze(params))
  except InputError as error:
    raise InputError(f"The {role} is not the one that its network is for: {error}") from error
