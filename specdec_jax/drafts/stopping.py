"""A draft model that stops proposing tokens when it is not confident (Section 6).

The method follows SpecDec++ and AdaEDL. The probability that the model gives its most probable
token predicts whether a draft token will be accepted. The product of these probabilities along a
chain predicts whether verification will reach a token (experiments/gamma). The draft continues
while that product is at least `threshold`. The decision to propose a token depends on the
distributions of earlier draft tokens, never on the token itself, so token verification stays exact.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Key

from specdec_jax.core.arrays import split_rows
from specdec_jax.core.trees import require_chain
from specdec_jax.core.types import Context, Proposal
from specdec_jax.drafts.model import ModelDraft, extend_last_tokens
from specdec_jax.errors import require_number
from specdec_jax.wrappers import WrappedDraft


@dataclasses.dataclass(frozen=True)
class StoppingDraft(WrappedDraft):
  """A draft that proposes a chain, which ends where the draft model is not confident.

  It proposes at least one token. A token that is not proposed is -1, and its q is 0.

  Attributes:
    draft: draft of the model; its gamma is the maximum number of tokens.
    threshold: lowest product of probabilities at which the draft continues (see the module
      docstring), in [0, 1]; with threshold 0 all tokens are proposed.

  Raises:
    InputError: the tree is not a chain, or the threshold is outside [0, 1].
  """

  draft: ModelDraft
  threshold: float

  def __post_init__(self):
    require_chain("a draft that stops early", self.draft.tree)
    object.__setattr__(self, "threshold", require_number("threshold", self.threshold, 0, 1))

  @property
  def verify_lengths(self) -> tuple[int, ...]:  # type: ignore[override]
    return tuple(range(1, self.tree.depth + 1))

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B *depths"]
  ) -> tuple[Proposal, Any]:
    model, gamma = self.draft.model, self.tree.depth
    logits, _, cache = extend_last_tokens(model, params, state, context, self.draft.reread)
    keys = rng.T if self.draft.coupled else split_rows(rng, gamma)
    first, first_q, text = self.draft.sample_next(keys[0], context, logits)
    tokens = jnp.full((len(logits), gamma), -1).at[:, 0].set(first)
    q = jnp.zeros((*tokens.shape, logits.shape[-1])).at[:, 0].set(first_q)

    def any_row_continues(carry):
      num_proposed, _, _, reach_probability, *_ = carry
      return (num_proposed < gamma) & (reach_probability >= self.threshold).any()

    def step(carry):
      num_proposed, cache, guess, reach_probability, text, tokens, q = carry
      logits, _, cache = model.extend(params, cache, guess[:, None], self.tree, num_proposed)
      after = context._replace(tokens=text, length=context.length + num_proposed)
      guess, guess_q, text = self.draft.sample_next(keys[num_proposed], after, logits[:, 0])
      continues = reach_probability >= self.threshold
      tokens = tokens.at[:, num_proposed].set(jnp.where(continues, guess, -1))
      q = q.at[:, num_proposed].set(jnp.where(continues[:, None], guess_q, 0.0))
      reach_probability = reach_probability * confidence(logits[:, 0])
      return num_proposed + 1, cache, guess, reach_probability, text, tokens, q

    carry = jnp.ones((), jnp.int32), cache, first, confidence(logits), text, tokens, q
    _, cache, *_, tokens, q = lax.while_loop(any_row_continues, step, carry)
    return Proposal(tokens, q), cache


def confidence(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
  """Return the probability of the most probable token at temperature 1, without top-k or top-p."""
  return jnp.exp(-jax.nn.logsumexp(logits - logits.max(axis=-1, keepdims=True), axis=-1))
