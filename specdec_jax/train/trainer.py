"""Training loop: Adafactor on batches of parallel text, with checkpoints from which it resumes."""

import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.errors import InputError, require_count, require_number
from specdec_jax.measure.machine import commit
from specdec_jax.measure.progress import Progress
from specdec_jax.models.partitioning import make_mesh, param_shardings
from specdec_jax.train.batches import PADDING, Batch, ParallelText, epoch_batches, padded_batches
from specdec_jax.train.objectives import Objective


@dataclasses.dataclass(frozen=True)
class TrainSettings:
  """Settings of a training run, such as its length, learning rate and sharding.

  Attributes:
    epochs: number of passes over the training pairs.
    max_steps: maximum number of steps; None to train for all epochs.
    tokens_per_batch: approximate number of source tokens in a batch, padding included.
    peak_learning_rate: highest learning rate of Adafactor with parameter scaling: the size of an
      update relative to the parameter.
    warmup_steps: steps of linear warm-up, before a cosine decay to zero at the end of training.
    label_smoothing: probability mass spread evenly over the vocabulary.
    seed: seed of initialization, batch order, and randomness of the loss, such as dropout.
    save_every: number of steps between checkpoints. The end of each epoch is saved, too.
    model_parallel: number of this host's devices across which each copy of the model is sharded
      (`partitioning.RULES`). The rows of a batch are divided among the copies.
  """

  epochs: int = 12
  max_steps: int | None = None
  tokens_per_batch: int = 1152
  peak_learning_rate: float = 0.05
  warmup_steps: int = 500
  label_smoothing: float = 0.1
  seed: int = 0
  save_every: int = 200
  model_parallel: int = 1

  def __post_init__(self):
    require_count("seed", self.seed, 0)
    for name in ("epochs", "tokens_per_batch", "save_every", "model_parallel"):
      require_count(name, getattr(self, name))
    if self.max_steps is not None:
      require_count("max_steps", self.max_steps)
    require_count("warmup_steps", self.warmup_steps, 0)
    require_number("peak_learning_rate", self.peak_learning_rate, 0, math.inf, "(]")
    require_number("label_smoothing", self.label_smoothing, 0, 1, "[)")


def train(
  objective: Objective,
  settings: TrainSettings,
  train_pairs: ParallelText,
  valid_pairs: ParallelText,
  output_dir: str,
  init: Any | None = None,
  bleu: Callable[[Any], float] | None = None,
) -> Any:
  """Train to the last step and return the trained parameters.

  Training resumes from the latest checkpoint in `output_dir` if there is one. The result is the
  same as that of an uninterrupted run.

  Args:
    valid_pairs: pairs for the scores that are printed after each epoch.
    output_dir: folder for `checkpoints/` and for `metrics.jsonl`, which has one line per epoch. For
      a resumed epoch, `train_loss`, `tokens_per_s` and `seconds` cover only the steps since the
      last start. Times include compilation. With `init` and `bleu`, epoch 0 is before training.
    init: initial parameters; None for random parameters from `objective.init`.
    bleu: function from parameters to BLEU on validation text; it is called after each epoch.

  Raises:
    InputError: no training or validation pair fits into a batch, the warm-up is at least as long as
      the run, `model_parallel` does not divide the number of devices, or a loss or a parameter is
      not finite. In the last case, the checkpoints from before that step remain.
  """
  output = pathlib.Path(output_dir).absolute()
  mesh = make_mesh(settings.model_parallel)
  batches_of = functools.partial(
    epoch_batches, tokens_per_batch=settings.tokens_per_batch, multiple=mesh.shape["data"]
  )
  steps_per_epoch = len(batches_of(train_pairs, seed=0, epoch=0))
  valid_batches = batches_of(valid_pairs, seed=0, epoch=0)
  for name, count in (("training", steps_per_epoch), ("validation", len(valid_batches))):
    if not count:
      raise InputError(f"There are no {name} pairs that fit into a batch; give at least one.")
  total = min(settings.epochs * steps_per_epoch, settings.max_steps or sys.maxsize)
  if settings.warmup_steps >= total:
    raise InputError(
      f"warmup_steps is {settings.warmup_steps}, but the whole run has {total} steps; warm up for "
      "less, or train for longer."
    )
  optimizer = optax.adafactor(
    optax.warmup_cosine_decay_schedule(
      0.0, settings.peak_learning_rate, settings.warmup_steps, total
    )
  )
  rng = jax.random.key(settings.seed)

  def shard(params: Any) -> Any:
    return jax.device_put(params, param_shardings(params, mesh))

  # `init` is copied, since each step donates the memory of its state to the next step.
  params = shard(objective.init(rng) if init is None else jax.tree.map(jnp.array, init))
  frozen = shard(objective.frozen)
  replicated, batch_sharding = (
    NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",))
  )
  counters = {"opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
  state = {"params": params, **jax.device_put(counters, replicated)}
  out_shardings = jax.tree.map(lambda x: x.sharding, state), replicated

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)
  def train_step(state, frozen, batch: Batch):
    key = jax.random.fold_in(rng, state["step"])

    def loss_of(params: Any) -> Array:
      return objective.loss(params, frozen, batch, key, state["step"] / total)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    # The gradients are not scaled, because Adafactor's updates do not depend on their scale.
    updates = jax.tree.map(optax.tree.scale, objective.rates, updates)
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

  scores_of = jax.jit(objective.scores)

  def write_scores(epoch: int, step: int, **of_training: float | None) -> None:
    scores = [
      scores_of(state["params"], frozen, jax.device_put(batch, batch_sharding))
      for batch in padded_batches(valid_pairs, valid_batches)
    ]
    means = {name: float(np.mean([each[name] for each in scores])) for name in scores[0]}
    score = bleu(state["params"]) if bleu else None
    scored = {"epoch": epoch, "step": step, **means, "bleu": score, **of_training}
    metrics: dict[str, Any] = {**scored, "commit": commit()}
    _write_metrics(output / "metrics.jsonl", metrics)
    print(json.dumps(metrics), flush=True)

  def save(step: int, losses: list[Array]) -> None:
    _require_finite(step, losses, state["params"])
    checkpoints.save(step, args=ocp.args.StandardSave(state))

  options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
  manager = ocp.CheckpointManager(output / "checkpoints", options=options)
  with manager as checkpoints, Progress() as bar:
    if checkpoints.latest_step() is not None:
      restore = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
      state = checkpoints.restore(checkpoints.latest_step(), args=restore)
    step = int(state["step"])
    if step == 0 and init is not None and bleu:
      write_scores(0, step, train_loss=None, tokens_per_s=0.0, seconds=0.0)
    task = bar.add_task("training", total=total, completed=step)
    while step < total:
      epoch, skip = divmod(step, steps_per_epoch)
      batches = batches_of(train_pairs, seed=settings.seed, epoch=epoch)[skip:]
      batches = batches[: total - step]
      since, tokens, losses = time.perf_counter(), 0, []
      for batch in padded_batches(train_pairs, batches):
        state, loss = train_step(state, frozen, jax.device_put(batch, batch_sharding))
        step += 1
        tokens += int((batch.targets != PADDING).sum())
        losses.append(loss)
        if step % 20 == 0:  # rarely, since reading a loss waits for its step
          recent = np.mean(_require_finite(step, losses[-20:]))
          rate = tokens / (time.perf_counter() - since)
          note = f"epoch {epoch + 1}/{settings.epochs}  loss {recent:.3f}  {rate:,.0f} tokens/s"
          bar.update(task, completed=step, description=note)
        if step % settings.save_every == 0 and step % steps_per_epoch != 0:
          save(step, losses)
      train_loss = float(np.mean(_require_finite(step, losses, state["params"])))
      seconds = time.perf_counter() - since
      rate = tokens / seconds
      write_scores(epoch + 1, step, train_loss=train_loss, tokens_per_s=rate, seconds=seconds)
      save(step, losses)
  return state["params"]


@jax.jit
def _is_finite(params: Any) -> Array:
  return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()


def _require_finite(step: int, losses: list[Array], params: Any = None) -> list[np.ndarray]:
  """Return the losses of the steps up to `step`; raise InputError if one is not finite."""
  values = jax.device_get(losses)
  for number, loss in enumerate(values, step - len(values) + 1):
    if not np.isfinite(loss):
      raise InputError(
        f"The loss of step {number} is {loss}; lower peak_learning_rate, or look for texts or "
        "weights that are not finite. The checkpoints from before that step remain."
      )
  if params is not None and not _is_finite(params):
    raise InputError(
      f"After step {step}, the parameters are not finite; lower peak_learning_rate. The "
      "checkpoints from before that step remain."
    )
  return values


def _write_metrics(path: pathlib.Path, metrics: dict) -> None:
  """Write the line of an epoch, and drop old lines of this and later epochs.

  A run that was stopped between the line of an epoch and its checkpoint repeats that epoch.
  """
  lines = path.read_text().splitlines() if path.exists() else []
  lines = [line for line in lines if json.loads(line)["epoch"] < metrics["epoch"]]
  with atomic_write(path) as file:
    file.write("\n".join([*lines, json.dumps(metrics), ""]))
