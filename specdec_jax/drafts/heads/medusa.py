"""Independent heads over the target's hidden state (Stern et al., 2018; Medusa).

Each future position has its own residual block. The target's output projection turns the output of
the block into logits. A draft token does not depend on the draft tokens before it.
"""

import dataclasses

import jax.numpy as jnp

from specdec_jax.drafts.heads.stateless import ResidualBlocks, StatelessHead, StatelessModule


class MedusaModule(StatelessModule):
  """One residual block per future position, followed by the target's output projection."""

  def setup(self):
    self.head = ResidualBlocks(self.config, self.config.gamma)

  def begin(self, hidden, last_token, depth, source, project):
    return project(self.head(hidden)[:, :depth]), jnp.zeros((len(hidden), 1, 0))

  def step(self, plan, state, level, previous, source):
    logits = jnp.broadcast_to(plan[:, level, None], (*previous.shape, plan.shape[-1]))
    return logits, jnp.zeros((*previous.shape, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHead(StatelessHead):
  """Draft heads of Medusa."""

  kind: str = "heads"
  module_class = MedusaModule
  uses_target_logits = True
