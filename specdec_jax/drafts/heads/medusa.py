"""Independent heads over the target's hidden state (Stern et al., 2018; Medusa).

Each future position has its own residual block. The target's output projection turns the output of
the block into logits. A draft token does not depend on the draft tokens before it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.drafts.heads.base import Source
from specdec_jax.drafts.heads.stateless import ResidualBlocks, StatelessHead, StatelessModule


class MedusaModule(StatelessModule):
  """One residual block per future position, followed by the target's output projection."""

  def setup(self):
    self.head = ResidualBlocks(self.config, self.config.gamma)

  def begin(
    self,
    hidden: Float[Array, "B E"],
    last_token: Int[Array, " B"],
    depth: int,
    source: Source,
    project: Callable[[Array], Array],
  ) -> tuple[Any, Float[Array, "B 1 d"]]:
    return project(self.head(hidden)[:, :depth]), jnp.zeros((len(hidden), 1, 0))

  def step(
    self,
    plan: Any,
    state: Float[Array, "B M d"],
    level: int,
    previous: Int[Array, "B M"],
    source: Source,
  ) -> tuple[Float[Array, "B M V"], Float[Array, "B M d_out"]]:
    logits = jnp.broadcast_to(plan[:, level, None], (*previous.shape, plan.shape[-1]))
    return logits, jnp.zeros((*previous.shape, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHead(StatelessHead):
  """Learned draft heads of Medusa."""

  kind: str = "heads"
  module_class = MedusaModule
  uses_target_logits = True
