"""A smaller model as draft that stops where it is no longer sure (Section 6; SpecDec++, AdaEDL).

Its probability of what it thinks most likely tells beforehand whether a guess will stand, and the
product of these along a chain whether it will be reached (experiments/gamma). A next guess is made
while that product is at least `threshold`. When to stop follows from laws at tokens that are drawn
already, never from the draw of the guess that it is about: so token verification stays exact.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specdec_jax.core.sampling import draw
from specdec_jax.core.trees import Tree, require_chain
from specdec_jax.core.types import Context, Draft, Proposal
from specdec_jax.drafts.model import ModelDraft, read_newest
from specdec_jax.errors import require_number


@dataclasses.dataclass(frozen=True)
class StoppingDraft(Draft):
  """A chain of a model's guesses, at least one; those not made are -1, and their q is 0.

  Attributes:
    draft: the model's, with the largest gamma.
    threshold: in [0, 1]; with 0 all guesses are made.

  Raises:
    InputError: the tree is no chain, or threshold is not from 0 to 1.
  """

  draft: ModelDraft
  threshold: float
  tree: Tree = dataclasses.field(init=False)
  widths: tuple[int, ...] = dataclasses.field(init=False)

  def __post_init__(self):
    require_chain("a draft that stops early", self.draft.tree)
    object.__setattr__(self, "threshold", require_number("threshold", self.threshold, 0, 1))
    object.__setattr__(self, "tree", self.draft.tree)
    object.__setattr__(self, "widths", tuple(range(1, self.tree.depth + 1)))

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return self.draft.start(params, context, hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    model, sampling, gamma = self.draft.model, self.draft.sampling, self.tree.depth
    newest, _, cache = read_newest(model, params, state, context, self.draft.reread)
    keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng)  # [G, B]
    first, law = draw(keys[0], newest, sampling)
    tokens = jnp.full((len(newest), gamma), -1).at[:, 0].set(first)
    q = jnp.zeros((*tokens.shape, newest.shape[-1])).at[:, 0].set(law)

    def going(carry):
      made, _, _, worth, *_ = carry
      return (made < gamma) & (worth >= self.threshold).any()

    def step(carry):
      made, cache, guess, worth, tokens, q = carry
      logits, _, cache = model.extend(params, cache, guess[:, None], self.tree, made)
      guess, law = draw(keys[made], logits[:, 0], sampling)
      sure = worth >= self.threshold
      tokens = tokens.at[:, made].set(jnp.where(sure, guess, -1))
      q = q.at[:, made].set(jnp.where(sure[:, None], law, 0.0))
      return made + 1, cache, guess, worth * confidence(logits[:, 0]), tokens, q

    begun = jnp.ones((), jnp.int32), cache, first, confidence(newest), tokens, q
    _, cache, *_, tokens, q = lax.while_loop(going, step, begun)
    return Proposal(tokens, q), cache


def confidence(logits: Array) -> Array:
  """The probability [...] of the most probable token by logits [..., V], as the model has them."""
  return jnp.exp(-jax.nn.logsumexp(logits - logits.max(axis=-1, keepdims=True), axis=-1))
