"""One step per draft token, from the previous token and state, as in EAGLE (Li et al., 2024).

Unlike EAGLE's, the head does not attend to the text; that of kind 'eagle_text' does. The first
state is a projection of the target's hidden state. The head computes the later states.
"""

import dataclasses

import jax.numpy as jnp

from specdec_jax.drafts.heads.stateless import SourceLayer, StatelessHead, StatelessModule
from specdec_jax.models.layers import Dense, Logits, embedder, norm


class EagleModule(StatelessModule):
  """Decoder layer over (previous token, previous state), without self-attention."""

  def setup(self):
    cfg = self.config
    self.state_norm, self.before_norm, self.out_norm = norm(cfg), norm(cfg), norm(cfg)
    self.state, self.join = Dense(cfg, cfg.emb_dim), Dense(cfg, cfg.emb_dim)
    self.token_embedder = embedder(cfg)
    self.layer = SourceLayer(cfg)
    self.logits_dense = Logits(cfg, cfg.output_size)

  def begin(self, hidden, last_token, depth, source, project):
    return (), self.state(self.state_norm(hidden))[:, None]

  def step(self, plan, state, level, previous, source):
    inputs = self.before_norm(state), self.token_embedder(previous)
    x = self.layer(self.join(jnp.concatenate(inputs, axis=-1)), source)
    return self.logits_dense(self.out_norm(x)), x


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(StatelessHead):
  """Learned draft head of EAGLE."""

  kind: str = "eagle"
  any_depth = True
  uses_cross_attention = True
  module_class = EagleModule
