"""A learned module on the target's own states as draft: heads, EAGLE, or all guesses in one pass.

It keeps nothing between rounds: the pass that judged the last guesses left the state that the next
ones begin with (`Context.hidden`), and the source has been read by the target.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.core.arrays import take
from specdec_jax.core.sampling import Sampling, sample_siblings
from specdec_jax.core.trees import AnyTree, DynamicTree
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.dynamic import grow, require_candidates
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, module_of
from specdec_jax.models.simulated import unwrapped_cache
from specdec_jax.models.speculator import Source, SpeculatorConfig, in_rows


@dataclasses.dataclass(frozen=True)
class SpeculatorDraft(Draft):
  """Guesses level by level: siblings without replacement, or a tree that goes where it is sure.

  Its parameters are a pair: its own, and those of the target that its logits are read off with.

  Attributes:
    config: of a module that guesses in rows.
    target: shape of the target.
    sampling: how logits become q.
    tree: of the guesses.
    width: of a tree whose shape changes: nodes of a level that have children, and how many each.

  Raises:
    InputError: the tree is deeper than the module can guess, or has more guesses than candidates.
  """

  config: SpeculatorConfig
  target: Config
  sampling: Sampling
  tree: AnyTree
  width: int = 8

  def __post_init__(self):
    require_depth(self.config, self.tree.depth)
    if isinstance(self.tree, DynamicTree):
      require_candidates(self.tree, self.width)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    own, of_target = params
    module, target = in_rows(self.config), module_of(self.target)
    project = lambda x: target.apply({"params": of_target}, x, method="logits")
    apply = lambda method, *args: module.apply({"params": own}, *args, method=method)
    source, before = source_of(self.config, context), context.last_token[:, None]
    plan, states = apply(
      "begin", context.hidden, context.last_token, self.tree.depth, source, project
    )
    tree = self.tree
    if isinstance(tree, DynamicTree):

      def read(states: Array, tokens: Array, before: Array, level: int) -> tuple[Array, Array]:
        return apply("step", plan, _of_rows(states, before), level, tokens, source)

      logits, states = apply("step", plan, states, 0, before, source)
      return grow(tree, self.width, logits[:, 0], read, states)[0], state
    keys = jax.vmap(lambda key: jax.random.split(key, tree.depth), out_axes=1)(rng)  # [D, B]
    tokens, q, above = [], [], 0
    for place, (first, last) in enumerate(tree.levels):
      logits, states = apply("step", plan, states, place, before, source)
      counts = [tree.parents.count(node) for node in range(above, first)]
      before, laws = sample_siblings(keys[place], logits, self.sampling, counts)
      states = take(states, [tree.parents[node - 1] - above for node in range(first, last)])
      tokens.append(before)
      q.append(laws)
      above = first
    return Proposal(jnp.concatenate(tokens, axis=1), jnp.concatenate(q, axis=1)), state


def _of_rows(states: Array, nodes: Array) -> Array:
  """States [B, M, d] of some of the nodes, [B, k], of each row."""
  return jnp.take_along_axis(states, nodes[..., None], axis=1)


def target_cache(context: Context) -> Any:
  """Return the cache of the target itself, whose acceptance may be simulated."""
  return unwrapped_cache(context.target_cache)


def source_of(config: SpeculatorConfig, context: Context) -> Source:
  """What a module reads of the source: keys, values and bias of the target's last layer."""
  cache = target_cache(context)
  return (cache.cross[-1], cache.cross_bias) if config.has_encoder else (None, None)


def require_depth(config: SpeculatorConfig, gamma: int) -> None:
  """Raise InputError if so many guesses in a row are more than a module can make."""
  if config.most is not None and gamma > config.most:
    raise InputError(
      f"gamma is {gamma}, but this draft makes up to {config.most} guesses in a row; lower gamma."
    )
