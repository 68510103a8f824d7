"""The target as its own draft by look-ahead embeddings: PaSS (Monea et al., 2023).

One pass over the newest token and embeddings that stand for those to come gives all guesses, the
first of which is the target's own choice; another pass judges them. What it writes into the cache
is forgotten with it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.core.sampling import Sampling, sample_logits
from specdec_jax.core.trees import Tree, require_chain
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.speculator import require_depth, target_cache
from specdec_jax.models.families import Config, module_of
from specdec_jax.models.speculator import SpeculatorConfig


@dataclasses.dataclass(frozen=True)
class PaSSDraft(Draft):
  """A chain of guesses, each drawn knowing none of the others.

  Its parameters are a pair: the embeddings, and the target's.

  Attributes:
    config: of the embeddings.
    target: shape of the target.
    sampling: how logits become q.
    tree: a chain.

  Raises:
    InputError: the tree is no chain, or there are too few embeddings for so many guesses.
  """

  config: SpeculatorConfig
  target: Config
  sampling: Sampling
  tree: Tree
  reads_target_cache = True

  def __post_init__(self):
    require_chain("a draft by look-ahead embeddings", self.tree)
    require_depth(self.config, self.tree.depth)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    (own, of_target), gamma = params, self.tree.depth
    embedded = of_target["token_embedder"]["embedding"][context.last_token][:, None]
    ahead = jnp.broadcast_to(
      own["embeddings"][: gamma - 1], (len(rng), gamma - 1, self.config.state_dim)
    )
    block = jnp.concatenate([embedded, ahead], axis=1).astype(self.target.activations)
    module, cache = module_of(self.target), target_cache(context)
    logits, _, _ = module.apply({"params": of_target}, cache, block, method="read")
    keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng)
    each = [sample_logits(keys[place], logits[:, place], self.sampling) for place in range(gamma)]
    tokens, q = (jnp.stack(field, axis=1) for field in zip(*each))
    return Proposal(tokens, q), state
