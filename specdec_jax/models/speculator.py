"""Small modules that guess from what a target has read: drafts that live on its states.

Those that guess in rows (`Heads`, `Eagle`, `Parallel`) begin with the target's last state where it
chose the newest token, and with that token, and read the source, where there is one, by the
target's own cross-attention keys and values. What they need of the text is in that state: they keep
no cache, and have nothing to roll back.

Axes: R rows, M nodes of a level, G guesses in a row, E embed of the target, d of the module, V
vocabulary.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specdec_jax.errors import require_count
from specdec_jax.models.config import TransformerConfig
from specdec_jax.models.decoder import KeysValues
from specdec_jax.models.layers import Attention, Dense, Embed, Mlp, embedder, norm

Kind = Literal["heads", "eagle", "parallel", "look_ahead", "exit", "decoder", "anchored"]
Source = tuple[KeysValues, Array] | tuple[None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculatorConfig(TransformerConfig):
  """The shape of such a module. `emb_dim` is its own width d; heads are those of the target.

  Attributes:
    kind: what it is.
      'heads': a layer of its own for each place over the target's state, read off by the target's
      logits (Stern et al., 2018; Medusa).
      'eagle': a step a guess, over the token before and the state, which is its own from the second
      guess on (Li et al., 2024).
      'parallel': all states in one pass, and a correction of low rank for the token before each.
      'look_ahead': embeddings that the target reads in place of the tokens to come (PaSS).
      'exit': a layer over the state of the target's first layers.
      'decoder': a decoder with a cache that reads what the target has encoded.
      'anchored': the same, told the target's state where the round began (`models.anchored`).
    state_dim: E.
    gamma: the most guesses in a row that it learns; 'exit' and 'decoder' learn one, and may be
      asked for more, as 'eagle' and 'anchored' may.
    rank: of the correction of 'parallel'.
    exit_layers: of 'exit', how many of the target's layers are read.
    has_encoder: whether the target has one.
  """

  embedding_std: ClassVar[float] = 1.0
  logits_divisor: ClassVar[float] = 1.0

  kind: Kind
  state_dim: int
  gamma: int
  rank: int = 64
  exit_layers: int = 1
  has_encoder: bool = True

  def __post_init__(self):
    super().__post_init__()
    for name in ("state_dim", "gamma", "rank", "exit_layers"):
      require_count(name, getattr(self, name))

  @property
  def most(self) -> int | None:
    """The most guesses in a row that it can make; None for any number."""
    return self.gamma if self.kind in ("heads", "parallel", "look_ahead") else None


def speculator_config(
  target: TransformerConfig,
  kind: Kind = "parallel",
  gamma: int = 8,
  emb_dim: int = 160,
  mlp_dim: int = 512,
  num_layers: int = 2,
  rank: int = 64,
  exit_layers: int = 1,
) -> SpeculatorConfig:
  """The shape of a module for a target of this shape; see `SpeculatorConfig`.

  Raises:
    InputError: one of the sizes is no whole number from 1.
  """
  return SpeculatorConfig(
    kind=kind,
    vocab_size=target.vocab_size,
    padded_vocab_size=target.padded_vocab_size,
    state_dim=target.emb_dim,
    has_encoder=target.has_encoder,
    num_heads=target.num_heads,
    head_dim=target.head_dim,
    gamma=gamma,
    emb_dim=emb_dim,
    mlp_dim=mlp_dim,
    num_decoder_layers=num_layers,
    rank=rank,
    exit_layers=exit_layers,
    dtype=target.dtype,
  )


class Speculator(nn.Module):
  """One that guesses in rows: `begin` says what is known before any guess, `step` the logits of the
  next guess from the token before.

  Attributes:
    config: its shape.
  """

  config: SpeculatorConfig

  @abc.abstractmethod
  def begin(
    self,
    hidden: Array,
    newest: Array,
    count: int,
    source: Source,
    project: Callable[[Array], Array],
  ) -> tuple[Any, Array]:
    """What holds for all guesses of a round, and the state [R, 1, d] before the first.

    Args:
      hidden: [R, E], the target's.
      newest: [R], the newest token.
      count: guesses in a row that are to be made.
      source: keys and values [R, H, S, D] of the target's last layer, and their bias [R, 1, 1, S].
      project: the target's logits [..., V] of states [..., E].
    """

  @abc.abstractmethod
  def step(
    self, plan: Any, state: Array, place: int, before: Array, source: Source
  ) -> tuple[Array, Array]:
    """Logits [R, M, V] of guess `place`, from 0, and the states [R, M, d] for those after it.

    Args:
      plan: of `begin`.
      state: [R, M, d], after the guesses before; of `begin` for the first.
      place: how many guesses there were before.
      before: [R, M], the last of them, or the newest token.
      source: as in `begin`.
    """

  def __call__(
    self, hidden: Array, before: Array, source: Source, project: Callable[[Array], Array]
  ) -> Array:
    """Logits [R, G, V] of guesses in a row, whatever was guessed before each: `before` [R, G], of
    which the first is the newest token."""
    plan, state = self.begin(hidden, before[:, 0], before.shape[1], source, project)
    each = []
    for place in range(before.shape[1]):
      logits, state = self.step(plan, state, place, before[:, place, None], source)
      each.append(logits)
    return jnp.concatenate(each, axis=1)


class Head(nn.Module):
  """A residual layer for each of some places over a state [..., E]: states [..., places, E]."""

  config: SpeculatorConfig
  places: int = 1

  @nn.compact
  def __call__(self, hidden: Array) -> Array:
    more = nn.silu(
      Dense(self.config, self.places * self.config.state_dim)(norm(self.config)(hidden))
    )
    # What is added is of the size of the state, however the target's last norm scales it.
    size = jnp.sqrt(jnp.mean(jnp.square(hidden), axis=-1))[..., None, None]
    return hidden[..., None, :] + size * more.reshape(*hidden.shape[:-1], self.places, -1)


class Heads(Speculator):
  """Blockwise parallel decoding's, and Medusa's: places know nothing of each other."""

  def setup(self):
    self.head = Head(self.config, self.config.gamma)

  def begin(self, hidden, newest, count, source, project):
    return project(self.head(hidden)[:, :count]), jnp.zeros((len(hidden), 1, 0))

  def step(self, plan, state, place, before, source):
    logits = jnp.broadcast_to(plan[:, place, None], (*before.shape, plan.shape[-1]))
    return logits, jnp.zeros((*before.shape, 0))


class SourceLayer(nn.Module):
  """Attention to the source, if there is one, and feed-forward: x [R, M, d] -> [R, M, d]."""

  config: SpeculatorConfig

  @nn.compact
  def __call__(self, x: Array, source: Source) -> Array:
    if source[0] is not None:
      attention = Attention(self.config, name="encoder_decoder_attention")
      x = x + attention(attention.queries(norm(self.config)(x)), *source)
    return x + Mlp(self.config, name="mlp")(norm(self.config)(x))


class Eagle(Speculator):
  """A decoder's layer over (token before, state before), with no text behind it but that state."""

  def setup(self):
    cfg = self.config
    self.state_norm, self.before_norm, self.out_norm = norm(cfg), norm(cfg), norm(cfg)
    self.state, self.join = Dense(cfg, cfg.emb_dim), Dense(cfg, cfg.emb_dim)
    self.token_embedder = embedder(cfg)
    self.layer = SourceLayer(cfg)
    self.logits_dense = Dense(cfg, cfg.table_size, jnp.float32, biases=False)

  def begin(self, hidden, newest, count, source, project):
    return (), self.state(self.state_norm(hidden))[:, None]

  def step(self, plan, state, place, before, source):
    x = self.join(jnp.concatenate([self.before_norm(state), self.token_embedder(before)], axis=-1))
    x = self.layer(x, source)
    return self.logits_dense(self.out_norm(x))[..., : self.config.vocab_size], x


class Parallel(Speculator):
  """All places in one pass; the guesses before each then move its logits, by a product of rank r.

  What was guessed is kept in a recurrent state as wide as the product's rank, so a guess depends on
  all before it and not on the last alone, at no cost but a product of r by r.
  """

  def setup(self):
    cfg = self.config
    self.state_norm, self.out_norm = norm(cfg), norm(cfg)
    self.state = Dense(cfg, cfg.emb_dim)
    self.token_embedder = embedder(cfg)
    places = cfg.gamma, cfg.emb_dim
    self.places = self.param("places", nn.initializers.normal(1.0), places, jnp.float32)
    self.layers = [SourceLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    self.logits_dense = Dense(cfg, cfg.table_size, jnp.float32, biases=False)
    self.mix, self.recur = Dense(cfg, cfg.rank), Dense(cfg, cfg.rank, biases=False)
    self.before = Embed(cfg.table_size, cfg.rank, dtype=cfg.activations)
    self.correction = Dense(cfg, cfg.table_size, jnp.float32, biases=False)

  def begin(self, hidden, newest, count, source, project):
    x = self.state(self.state_norm(hidden)) + self.token_embedder(newest)
    x = x[:, None] + self.places[:count].astype(x.dtype)
    for layer in self.layers:
      x = layer(x, source)
    x = self.out_norm(x)
    return (self.logits_dense(x), self.mix(x)), jnp.zeros((len(hidden), 1, self.config.rank))

  def step(self, plan, state, place, before, source):
    base, mix = plan
    state = nn.gelu(mix[:, place, None] + self.before(before) + self.recur(state))
    logits = base[:, place, None] + self.correction(state)
    return logits[..., : self.config.vocab_size], state


_IN_ROWS: dict[str, type[Speculator]] = {"heads": Heads, "eagle": Eagle, "parallel": Parallel}


def in_rows(config: SpeculatorConfig) -> Speculator:
  """The module of a kind that guesses in rows."""
  return _IN_ROWS[config.kind](config)
