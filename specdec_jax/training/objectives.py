"""What training makes small: for a model of texts, and between what a draft and a teacher think."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike

from specdec_jax.models.families import Config, init_params, module_of
from specdec_jax.training.batches import Batch

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk"]
_LEAST = 1e-6  # a probability, where its logarithm is taken


class Objective(NamedTuple):
  """What is trained, and to what end.

  Attributes:
    init: key -> parameters at random.
    loss: (parameters, frozen, batch, key, share of all steps that are done) -> what is made small.
    scores: (parameters, frozen, batch) -> what is told of validation text, by name.
    frozen: parameters that are read and stay as they are, a target's.
  """

  init: Callable[[Array], Any]
  loss: Callable[[Any, Any, Batch, Array, Array], Array]
  scores: Callable[[Any, Any, Batch], dict[str, Array]]
  frozen: Any = ()


def model_objective(
  config: Config, label_smoothing: float = 0.0, divergence: Divergence = "forward_kl"
) -> Objective:
  """A model of texts.

  Args:
    config: its shape, with the dropout rate of training.
    label_smoothing: share of the target mass spread evenly over the vocabulary, by 'forward_kl'.
    divergence: of the model from a teacher's opinions, or from the text if there are none.
  """
  module = module_of(config)

  def loss(params, frozen: Any, batch: Batch, rng: Array, share: Array) -> Array:
    logits = teacher_forced(module, params, batch, rng)
    if divergence == "forward_kl":
      return cross_entropy(logits, batch, label_smoothing)[0]
    each = divergences(logits, batch.labels, batch.weights, divergence, share)
    return _mean(each, batch.targets > 0)

  def scores(params, frozen: Any, batch: Batch) -> dict[str, Array]:
    found = cross_entropy(teacher_forced(module, params, batch), batch, 0.0)
    return dict(zip(("valid_loss", "valid_accuracy"), found))

  return Objective(lambda rng: init_params(config, rng), loss, scores)


def cross_entropy(logits: Array, batch: Batch, smoothing: float) -> tuple[Array, Array]:
  """Mean loss in nats and accuracy of logits [B, L, V] over targets that are not padding."""
  log_probs = jax.nn.log_softmax(logits)
  token = (jnp.take_along_axis(log_probs, batch.labels, axis=-1) * batch.weights).sum(axis=-1)
  loss = -(1 - smoothing) * token - smoothing * log_probs.mean(axis=-1)
  real = batch.targets > 0
  correct = logits.argmax(axis=-1) == batch.targets
  return _mean(loss, real), _mean(correct, real)


def teacher_forced(
  module: nn.Module, params, batch: Batch, dropout_rng: Array | None = None
) -> Array:
  """Logits [B, L, V] at each target position, given the targets before it."""
  inputs = jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))  # starts with pad, as T5 does
  rngs = None if dropout_rng is None else {"dropout": dropout_rng}
  return module.apply({"params": params}, batch.source, inputs, dropout_rng is None, rngs=rngs)


def divergences(
  logits: Array,
  tokens: ArrayLike,
  probs: ArrayLike,
  divergence: Divergence,
  share: Array | float = 0.0,
) -> Array:
  """Of q, by a draft's logits [..., V], from a teacher's p, in nats but for 'tv': [...].

  Of p are known the k likeliest tokens [..., k] and their probabilities; all other tokens count as
  one, for p and for q. So this is a lower bound of what all of p would give, and near it where the
  k have most of the mass.

  Args:
    logits: of the draft.
    tokens: [..., k], no two alike.
    probs: [..., k].
    divergence: 'forward_kl', KL(p, q); 'reverse_kl', KL(q, p); 'jsd', Jensen and Shannon's; 'tv',
      the total variation distance, which is 1 - beta (Theorem 5); 'lk', -log beta, mixed with
      KL(p, q), whose weight falls from 1 to 0 as training goes on.
    share: of the training that is done.
  """
  named = jnp.take_along_axis(jax.nn.softmax(logits), jnp.asarray(tokens), axis=-1)
  rest = lambda x: jnp.maximum(1 - x.sum(axis=-1, keepdims=True), 0)
  whole = lambda x: jnp.concatenate([x, rest(x)], axis=-1)
  p, q = whole(jnp.asarray(probs)), whole(named)
  log = lambda x: jnp.log(jnp.maximum(x, _LEAST))
  kl = lambda a, b: (a * (log(a) - log(b))).sum(axis=-1)
  if divergence == "forward_kl":
    return kl(p, q)
  if divergence == "reverse_kl":
    return kl(q, p)
  if divergence == "jsd":
    return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
  beta = jnp.minimum(p, q).sum(axis=-1)
  return 1 - beta if divergence == "tv" else share * -log(beta) + (1 - share) * kl(p, q)


def _mean(x: Array, real: ArrayLike) -> Array:
  return jnp.sum(x * real) / jnp.sum(real)
