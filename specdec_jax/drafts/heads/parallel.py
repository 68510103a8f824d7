"""Head that computes the logits of all draft tokens in one pass, and then corrects them in order.

The correction of a token depends on the draft tokens before it, through a recurrent state whose
width is the rank. A correction costs one rank x rank matmul and one rank x V matmul, for a
vocabulary of V tokens.
"""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn

from specdec_jax.drafts.heads.stateless import SourceLayer, StatelessHead, StatelessModule
from specdec_jax.models.layers import Dense, Embed, Logits, embedder, norm


class ParallelModule(StatelessModule):
  """Layers over one embedding per position, and a low-rank recurrent correction of the logits."""

  config: "ParallelHead"

  def setup(self):
    cfg = self.config
    self.state_norm, self.out_norm = norm(cfg), norm(cfg)
    self.state = Dense(cfg, cfg.emb_dim)
    self.token_embedder = embedder(cfg)
    places = cfg.gamma, cfg.emb_dim
    self.places = self.param("places", nn.initializers.normal(1.0), places, jnp.float32)
    self.layers = [SourceLayer(cfg) for _ in range(cfg.num_decoder_layers)]
    self.logits_dense = Logits(cfg, cfg.output_size)
    self.mix, self.recur = Dense(cfg, cfg.rank), Dense(cfg, cfg.rank, biases=False)
    self.before = Embed(cfg.table_size, cfg.rank, dtype=cfg.layout.activations)
    self.correction = Logits(cfg, cfg.output_size)

  def begin(self, hidden, last_token, depth, source, project):
    x = self.state(self.state_norm(hidden)) + self.token_embedder(last_token)
    x = x[:, None] + self.places[None, :depth].astype(x.dtype)
    for layer in self.layers:
      x = layer(x, source)
    x = self.out_norm(x)
    state = jnp.zeros((len(hidden), 1, self.config.rank), jnp.float32)
    return (self.logits_dense(x), self.mix(x)), state

  def step(self, plan, state, level, previous, source):
    base, mix = plan
    state = nn.gelu(mix[:, level, None] + self.before(previous) + self.recur(state))
    return base[:, level, None] + self.correction(state), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelHead(StatelessHead):
  """Learned draft head; `rank` is the rank of its correction of the logits."""

  kind: str = "parallel"
  rank: int = 64
  uses_cross_attention = True
  module_class = ParallelModule
