"""Checkpoints of the target and of the draft, restored as one train state."""

from flax import core
from t5x import checkpoints

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.errors import InputError

DRAFT = "draft"  # name of the draft's parameters, next to the target's encoder and decoder


class PairCheckpointer:
  """Checkpointer that restores the target from t5x's path and the draft from `draft_path`.

  t5x constructs it through `RestoreCheckpointConfig`: as `checkpoint_manager_cls` or, if
  `use_orbax` is False, as `checkpointer_cls`. In both cases it reads the formats of T5X and Orbax.
  """

  def __init__(self, *, train_state, partitioner, draft_path: str, restore_dtype=None, **_):
    """Create a checkpointer; t5x passes all arguments except `draft_path`."""
    self._train_state, self._partitioner = train_state, partitioner
    self._draft_path, self._restore_dtype = draft_path, restore_dtype

  def restore(self, path: str, **kwargs):
    """Return the train state with the parameters of target and draft.

    The shapes in both checkpoints are checked, because Orbax would silently truncate and pad arrays
    of a different shape. With `state_transformation_fns`, those of the target are not checked,
    because its checkpoint may then have a different structure.
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
    # Despite its name, this class reads both formats.
    manager = checkpoints.OrbaxCheckpointManagerInterface(
      path, state, self._partitioner, restore_dtype=self._restore_dtype
    )
    return manager.restore(path=path, **kwargs)


def require_shapes(role: str, path: str, params) -> None:
  """Raise InputError unless a checkpoint has the names and shapes of a network's parameters."""
  try:
    open_checkpoint(path).require_shapes(core.unfreeze(params))
  except InputError as error:
    raise InputError(f"The {role} is not the one that its network is for: {error}") from error
