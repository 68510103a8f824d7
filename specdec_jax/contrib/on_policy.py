"""Training of a draft on texts that it samples itself (DistillSpec; Zhou et al., 2024)."""

import dataclasses
from collections.abc import Callable

from specdec_jax.train.trainer import TrainSettings


def train_on_policy(
  train_draft: Callable[..., None],
  settings: TrainSettings,
  start: str,
  output: str,
  work_dir: str,
) -> None:
  """Train a draft with outputs that it samples anew before each epoch, and that the target labels.

  Each epoch has its own warm-up and decay of the learning rate, and its own folder in `work_dir`.

  Args:
    train_draft: `commands.train.train_draft` with its other arguments bound.
    start: folder of the draft from whose parameters training starts.
    output: folder for the trained draft.
  """
  once = dataclasses.replace(settings, epochs=1)
  for epoch in range(1, settings.epochs + 1):
    folder = f"{work_dir}/epoch_{epoch}"
    trained = output if epoch == settings.epochs else f"{folder}/draft"
    train_draft(
      settings=once,
      start=start,
      writer=start,
      output=trained,
      work_dir=folder,
      distillation_data=None,
    )
    start = trained
