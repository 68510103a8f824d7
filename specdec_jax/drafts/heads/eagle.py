"""EAGLE: one step per draft token, from the previous token and state (Li et al., 2024).

The first state is a projection of the target's hidden state. The head computes the later states.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.drafts.heads.base import Source
from specdec_jax.drafts.heads.stateless import SourceLayer, StatelessHead, StatelessModule
from specdec_jax.models.layers import Dense, Logits, embedder, norm


class EagleModule(StatelessModule):
  """Decoder layer over (previous token, previous state), without self-attention."""

  any_depth = True

  def setup(self):
    cfg = self.config
    self.state_norm, self.before_norm, self.out_norm = norm(cfg), norm(cfg), norm(cfg)
    self.state, self.join = Dense(cfg, cfg.emb_dim), Dense(cfg, cfg.emb_dim)
    self.token_embedder = embedder(cfg)
    self.layer = SourceLayer(cfg)
    self.logits_dense = Logits(cfg, cfg.output_size)

  def begin(
    self,
    hidden: Float[Array, "B E"],
    last_token: Int[Array, " B"],
    depth: int,
    source: Source,
    project: Callable[[Array], Array],
  ) -> tuple[Any, Float[Array, "B 1 d"]]:
    return (), self.state(self.state_norm(hidden))[:, None]

  def step(
    self,
    plan: Any,
    state: Float[Array, "B M d"],
    level: int,
    previous: Int[Array, "B M"],
    source: Source,
  ) -> tuple[Float[Array, "B M V"], Float[Array, "B M d_out"]]:
    inputs = self.before_norm(state), self.token_embedder(previous)
    x = self.layer(self.join(jnp.concatenate(inputs, axis=-1)), source)
    return self.logits_dense(self.out_norm(x)), x


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(StatelessHead):
  """Learned draft head of EAGLE."""

  kind: str = "eagle"
  uses_cross_attention = True
  module_class = EagleModule
