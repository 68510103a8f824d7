"""Training a module on a target's states: the target is frozen, and read as decoding reads it.

At some places of each text (anchors) the module guesses the tokens that come next, as after a round
that ended there; each guess learns the target's own opinion, given the text before it.

Axes: B batch, L target tokens, A anchors of a text, G guesses, E embed, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import Array, lax
from jax.typing import ArrayLike

from specdec_jax.drafts.early_exit import EarlyExitModel
from specdec_jax.drafts.layer_skip import of_layers
from specdec_jax.errors import InputError
from specdec_jax.models.families import (
  Config,
  anchored,
  init_params,
  model_of,
  module_of,
  without_encoder,
)
from specdec_jax.models.speculator import SpeculatorConfig, in_rows
from specdec_jax.models.t5 import T5
from specdec_jax.training.batches import Batch
from specdec_jax.training.objectives import Divergence, Objective, divergences


class Read(NamedTuple):
  """A batch as the target has read it.

  Attributes:
    inputs: [B, L], what stands before each token of the text.
    hidden: [B, L, E], the target's states where it chose these; 0 for the first.
    cache: of no token yet, with all of them in its slots, and the source.
    rng: for the choice of anchors; None to begin at the first token.
  """

  inputs: Array
  hidden: Array
  cache: Any
  rng: Array | None


# (parameters, the target's, read) -> logits [B, A, G, V] of guesses, and of which tokens [B, A, G].
Guesser = Callable[[Any, Any, Read], tuple[Array, Array]]


def speculator_objective(
  config: SpeculatorConfig,
  target: Config,
  target_params: Any,
  divergence: Divergence = "forward_kl",
  stride: int = 4,
  decay: float = 0.8,
) -> Objective:
  """A module that guesses what a target writes.

  Its score is the acceptance length at temperature 0: tokens a round, the target's own among them,
  of rounds that begin at the anchors, which is exact for texts that the target wrote by argmax.
  ('exit', 'decoder' and 'anchored' learn one guess after each token: the length is gamma 1's.)

  Args:
    config: of the module.
    target: shape of the target.
    target_params: its parameters.
    divergence: of guesses from the target's opinions (`objectives.divergences`).
    stride: tokens from one anchor to the next; the first is anywhere in the first `stride`.
    decay: weight of a guess over that of the one before it, which has to stand for it to count.
  """
  model: Any = model_of(target)
  makes = {"look_ahead": _look_ahead, "exit": _exit, "decoder": _decoder}
  of_anchors = _anchored if config.kind == "anchored" else _in_rows
  make = makes.get(config.kind, functools.partial(of_anchors, stride=stride))
  guesses = make(config, target)

  def guessed(params, frozen: Any, batch: Batch, rng: Array | None) -> tuple[Array, Array]:
    prompt, length = jnp.asarray(batch.source), batch.targets.shape[1]
    first, begins = model.prompt_tokens(prompt)
    newest = jnp.take_along_axis(first, begins[:, None] - 1, axis=1)
    inputs = jnp.concatenate([newest, batch.targets[:, :-1]], axis=1)
    _, cache = model.prefill(frozen, prompt, first.shape[1] + length + config.gamma)
    _, hidden, cache = model.extend(frozen, cache, inputs)
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return guesses(params, frozen, Read(inputs, hidden, cache, rng))

  def weighted(logits: Array, batch: Batch, places: Array, share: Array | float) -> Array:
    labels, weights = _at(batch.labels, places), _at(batch.weights, places)
    each = divergences(logits, labels, weights, divergence, share)
    weight = (_at(batch.targets, places) > 0) * decay ** jnp.arange(places.shape[-1])
    return (each * weight).sum() / weight.sum()

  def loss(params, frozen: Any, batch: Batch, rng: Array, share: Array) -> Array:
    logits, places = guessed(params, frozen, batch, rng)
    return weighted(logits, batch, places, share)

  def scores(params, frozen: Any, batch: Batch) -> dict[str, Array]:
    logits, places = guessed(params, frozen, batch, None)
    targets = _at(batch.targets, places)
    stands = (logits.argmax(axis=-1) == targets) & (targets > 0)
    begun = targets[..., 0] > 0
    length = 1 + jnp.cumprod(stands, axis=-1).sum(axis=-1)
    return {
      "valid_loss": weighted(logits, batch, places, 0.0),
      "valid_acceptance_length": (length * begun).sum() / begun.sum(),
    }

  return Objective(lambda rng: init_params(config, rng), loss, scores, target_params)


def begun_with(params: Any, config: Config, of: Any) -> Any:
  """Parameters of a module that begins with what it can take of a model as wide as it is.

  A decoder takes what has the same name and shape; the others embeddings, brought to variance
  1, which their own have. What logits are read off with is taken by all.

  Args:
    params: the module's.
    config: shape of the model.
    of: its parameters.

  Raises:
    InputError: the module has no table of tokens, or one of another shape.
  """
  flat = functools.partial(traverse_util.flatten_dict, sep="/")
  own, given = flat(params), flat(of)
  table, norm, logits = (
    "token_embedder/embedding",
    "decoder/decoder_norm/scale",
    "logits_dense/kernel",
  )
  wanted, found = given[table].shape, own[table].shape if table in own else None
  if wanted != found:
    raise InputError(
      f"the model has a table of tokens {wanted}, and the module {found or 'none'}; give a model "
      "of the same vocabulary and of the module's emb_dim, or none."
    )
  kernel = given.get(f"decoder/{logits}", given[table].T / config.logits_divisor)
  if norm in own:
    taken = {name: given[name] for name in own if np.shape(given.get(name)) == own[name].shape}
    taken[f"decoder/{logits}"] = kernel
  else:
    taken = {table: given[table] / given[table].std(), logits: given[norm][:, None] * kernel}
  return traverse_util.unflatten_dict(own | taken, sep="/")


def _at(x: ArrayLike, places: Array) -> Array:
  """What x [B, L, ...] has at places [B, A, G]; 0 past its end."""
  x, rows = jnp.asarray(x), jnp.arange(len(places))[:, None, None]
  return x.at[rows, places].get(mode="fill", fill_value=0)


def _in_rows(config: SpeculatorConfig, target: Config, stride: int) -> Guesser:
  """Heads, EAGLE, all guesses in one pass: at each anchor, from the state and the tokens there."""
  module, of_target = in_rows(config), module_of(target)

  def guesses(params, frozen: Any, read: Read) -> tuple[Array, Array]:
    batch, length = read.inputs.shape
    offset = 0 if read.rng is None else jax.random.randint(read.rng, (), 0, stride)
    anchors = offset + stride * jnp.arange(max(1, length // stride))
    places = jnp.broadcast_to(
      anchors[:, None] + jnp.arange(config.gamma), (batch, len(anchors), config.gamma)
    )
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    source: tuple[Any, Any] = None, None
    if config.has_encoder:
      each = lambda x: jnp.repeat(x, len(anchors), axis=0)
      source = jax.tree.map(each, (read.cache.cross[-1], read.cache.cross_bias))
    hidden, before = _at(read.hidden, places[..., :1])[:, :, 0], _at(read.inputs, places)
    project = lambda x: of_target.apply({"params": frozen}, x, method="logits")
    logits = module.apply({"params": params}, rows(hidden), rows(before), source, project)
    return logits.reshape(*places.shape, -1), places

  return guesses


def _look_ahead(config: SpeculatorConfig, target: Config) -> Guesser:
  """Embeddings behind one token of each text, as the target reads them there; what it says after
  that token itself is its own choice, and no guess."""
  of_target, model = module_of(target), model_of(target)

  def guesses(params, frozen: Any, read: Read) -> tuple[Array, Array]:
    batch, length = read.inputs.shape
    ends = (read.inputs > 0).sum(axis=1)  # of T5, whose first is 0, the last token's place
    share = 0.5 if read.rng is None else jax.random.uniform(read.rng, (batch,))
    anchor = (share * ends).astype(jnp.int32)
    newest = jnp.take_along_axis(read.inputs, anchor[:, None], axis=1)
    embedded = frozen["token_embedder"]["embedding"][newest]
    ahead = jnp.broadcast_to(params["embeddings"], (batch, *params["embeddings"].shape))
    block = jnp.concatenate([embedded, ahead], axis=1).astype(target.activations)
    cache: Any = read.cache
    cache = model.commit(cache, cache.length + anchor)
    logits, _, _ = of_target.apply({"params": frozen}, cache, block, method="read")
    places = anchor[:, None, None] + jnp.arange(1, config.gamma)
    return logits[:, None, 1:], places

  return guesses


def _exit(config: SpeculatorConfig, target: Config) -> Guesser:
  """The head, after each token, over what the target's first layers make of the text."""

  def guesses(params, frozen: Any, read: Read) -> tuple[Array, Array]:
    fewer, params_of = of_layers(target, frozen, range(config.exit_layers))
    model = EarlyExitModel(model_of(fewer), config)
    cache = read.cache.replace(layers=read.cache.layers[: config.exit_layers])
    if config.has_encoder:
      cache = cache.replace(cross=cache.cross[: config.exit_layers])
    logits, _, _ = model.extend((params, params_of), cache, read.inputs)
    return logits[:, :, None], _each_token(read.inputs)

  return guesses


def _decoder(config: SpeculatorConfig, target: Config) -> Guesser:
  """A decoder's own reading of the text, after each token."""
  module = T5(without_encoder(config))

  def guesses(params, frozen: Any, read: Read) -> tuple[Array, Array]:
    cross = read.cache.cross[-config.num_decoder_layers :]
    how = dict(cross=cross, cross_bias=read.cache.cross_bias)
    logits = module.apply({"params": params}, read.inputs, **how, method="on_source")
    return logits[:, :, None], _each_token(read.inputs)

  return guesses


def _anchored(config: SpeculatorConfig, target: Config, stride: int) -> Guesser:
  """The same, told the target's states at anchors, each token that of the last one before it.

  They are `stride` tokens apart; in training so on average, as rounds are of many lengths.
  """
  module = anchored(config)

  def guesses(params, frozen: Any, read: Read) -> tuple[Array, Array]:
    batch, length = read.inputs.shape
    tokens = jnp.arange(length)
    begins = jnp.broadcast_to(tokens % stride == 0, (batch, length))
    if read.rng is not None:
      begins = jax.random.bernoulli(read.rng, 1 / stride, (batch, length))
    anchors = lax.cummax(jnp.where(begins, tokens, 0), axis=1)
    hidden = jnp.take_along_axis(read.hidden, anchors[..., None], axis=1)
    source = read.cache.cross[-config.num_decoder_layers :], read.cache.cross_bias
    given = read.inputs, hidden, tokens - anchors, *source
    logits = module.apply({"params": params}, *given, method="after_each")
    return logits[:, :, None], _each_token(read.inputs)

  return guesses


def _each_token(inputs: Array) -> Array:
  batch, length = inputs.shape
  return jnp.broadcast_to(jnp.arange(length)[None, :, None], (batch, length, 1))
