"""Training losses: cross-entropy on texts, and divergences between a draft and a teacher."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike

from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, init_params, module_of
from specdec_jax.train.batches import PADDING, Batch

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk"]
_MIN_PROBABILITY = 1e-6  # lower bound inside logarithms


class Objective(NamedTuple):
  """Training objective: initial parameters, a loss and validation scores.

  Attributes:
    init: function from a random key to initial parameters.
    loss: function of (parameters, frozen, batch, key, progress) that returns a scalar loss.
      `progress` is the fraction of all training steps that are completed.
    scores: function of (parameters, frozen, batch) that returns validation scores by name.
    frozen: parameters that training does not change, such as those of a target.
    rates: pytree prefix of the parameters, whose numbers multiply the learning rate below them.
  """

  init: Callable[[Array], Any]
  loss: Callable[[Any, Any, Batch, Array, Array], Array]
  scores: Callable[[Any, Any, Batch], dict[str, Array]]
  frozen: Any = ()
  rates: Any = 1.0


def model_objective(
  config: Config, label_smoothing: float = 0.0, divergence: Divergence = "forward_kl"
) -> Objective:
  """Return the objective of a language model or translation model.

  Without a teacher, the targets replace its distributions.

  Args:
    config: configuration of the model, with the dropout rate of training.
    label_smoothing: probability mass spread evenly over the vocabulary; used by 'forward_kl' only.
    divergence: see `divergences`; 'forward_kl' is implemented as cross-entropy with the labels.
  """
  module = module_of(config)

  def loss(params, frozen: Any, batch: Batch, rng: Array, progress: Array) -> Array:
    logits = teacher_forced(module, params, batch, rng)
    if divergence == "forward_kl":
      return cross_entropy(logits, batch, label_smoothing)[0]
    per_token = divergences(logits, batch.labels, batch.weights, divergence, progress)
    return _masked_mean(per_token, batch.targets != PADDING)

  def scores(params, frozen: Any, batch: Batch) -> dict[str, Array]:
    valid_loss, accuracy = cross_entropy(teacher_forced(module, params, batch), batch, 0.0)
    return {"valid_loss": valid_loss, "valid_accuracy": accuracy}

  return Objective(functools.partial(init_params, config), loss, scores)


def cross_entropy(logits: Array, batch: Batch, smoothing: float) -> tuple[Array, Array]:
  """Return the mean loss in nats and the argmax accuracy of logits, over non-padding targets."""
  log_probs = jax.nn.log_softmax(logits)
  labelled = (jnp.take_along_axis(log_probs, batch.labels, axis=-1) * batch.weights).sum(axis=-1)
  loss = -(1 - smoothing) * labelled - smoothing * log_probs.mean(axis=-1)
  is_token = batch.targets != PADDING
  correct = logits.argmax(axis=-1) == batch.targets
  return _masked_mean(loss, is_token), _masked_mean(correct, is_token)


def teacher_forced(
  module: nn.Module, params, batch: Batch, dropout_rng: Array | None = None
) -> Array:
  """Return logits [B, T, V] at each target position, given the source and the preceding targets.

  A decoder-only model ignores the source. Dropout is applied if `dropout_rng` is given.
  """
  config = module.config
  start_id = config.eos_id if config.start_id is None else config.start_id
  inputs = jnp.maximum(batch.targets[:, :-1], 0)  # inputs after the text may be any token
  inputs = jnp.pad(inputs, ((0, 0), (1, 0)), constant_values=start_id)
  rngs = None if dropout_rng is None else {"dropout": dropout_rng}
  source = jnp.where(batch.source == PADDING, config.pad_id, batch.source)
  return module.apply({"params": params}, source, inputs, dropout_rng is None, rngs=rngs)


def divergences(
  logits: Array,
  tokens: ArrayLike,
  probs: ArrayLike,
  divergence: Divergence,
  progress: Array | float = 0.0,
) -> Array:
  """Return the divergence [...] between a draft's q and a teacher's p at each position.

  All tokens but the teacher's k most probable ones are merged into one, for p and for q, so the
  result is a lower bound on the divergence of the full distributions. It is tight where the k
  tokens carry most of the probability.

  Args:
    logits: [..., V], logits of the draft.
    tokens: [..., k], the most probable tokens of the teacher, which are distinct.
    probs: [..., k], the teacher's probabilities of these tokens.
    divergence: 'forward_kl', KL(p, q); 'reverse_kl', KL(q, p); 'jsd', the Jensen-Shannon
      divergence; 'tv', the total variation distance, which is D_LK = 1 - beta (Theorem 5); 'lk',
      a mixture of -log beta and KL(p, q), whose weight falls from 1 to 0 during training (it is not
      D_LK). All are in nats, except 'tv'.
    progress: fraction of training that is completed, for 'lk'.
  """
  q_known = jnp.take_along_axis(jax.nn.softmax(logits), jnp.asarray(tokens), axis=-1)
  p, q = _with_remainder(jnp.asarray(probs)), _with_remainder(q_known)
  if divergence == "forward_kl":
    return _kl(p, q)
  if divergence == "reverse_kl":
    return _kl(q, p)
  if divergence == "jsd":
    return (_kl(p, (p + q) / 2) + _kl(q, (p + q) / 2)) / 2
  beta = jnp.minimum(p, q).sum(axis=-1)
  if divergence == "tv":
    return 1 - beta
  if divergence == "lk":
    return progress * -_log(beta) + (1 - progress) * _kl(p, q)
  raise InputError(f"divergence is {divergence!r}; give one of {get_args(Divergence)}.")


def _with_remainder(probs: Array) -> Array:
  remainder = jnp.maximum(1 - probs.sum(axis=-1, keepdims=True), 0)
  return jnp.concatenate([probs, remainder], axis=-1)


def _log(x: Array) -> Array:
  return jnp.log(jnp.maximum(x, _MIN_PROBABILITY))


def _kl(p: Array, q: Array) -> Array:
  return (p * (_log(p) - _log(q))).sum(axis=-1)


def _masked_mean(x: Array, mask: ArrayLike) -> Array:
  return jnp.sum(x * mask) / jnp.sum(mask)
