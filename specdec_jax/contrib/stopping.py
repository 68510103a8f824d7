"""Drafts that stop early: a model that is no longer confident (Section 6).

`StoppingDraft` follows SpecDec++ and AdaEDL. The probability that the model gives its most probable
token predicts whether a draft token will be accepted. The product of these probabilities along a
chain predicts whether verification will reach a token (experiments/gamma). The draft continues
while that product is at least `threshold`. The decision to propose a token depends on the
distributions of earlier draft tokens (`bild.HandOverDraft`: and its own), never on the token
itself, so token verification stays exact.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_chain
from specdec_jax.core.types import (
  DraftOptions,
  DraftSpec,
  Keys,
  Loaded,
  LoadsDraft,
  Outcome,
  Proposal,
  WrappedDraft,
)
from specdec_jax.drafts.composed import build_model
from specdec_jax.drafts.model import ModelDraft, depth_keys, sample_next
from specdec_jax.errors import require_number


def stopping_draft(
  target: Loaded, draft: LoadsDraft, threshold: float, goal: float | None = None
) -> DraftSpec:
  """Return a draft model that proposes up to gamma tokens, and stops early if it is not confident.

  Args:
    threshold: see `StoppingDraft`.
    goal: acceptance rate to keep (`AdaptiveStoppingDraft`); None for a constant threshold.
  """
  model = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> StoppingDraft:
    built = build_model(model, sampling, tree, options)
    if goal is None:
      return StoppingDraft(built, threshold)
    return AdaptiveStoppingDraft(built, threshold, goal)

  rule = f"stops below {threshold:g}"
  if goal is not None:
    rule = f"stops for a rate of {goal:g}"
  return dataclasses.replace(model, name=f"{model.name} ({rule})", build=build, path=None)


@dataclasses.dataclass(frozen=True)
class StoppingDraft(WrappedDraft):
  """A draft that proposes a chain, which ends where the draft model is not confident.

  It proposes at least one token. A token that is not proposed is -1, and its q (if any) is 0.

  Attributes:
    threshold: lowest product of probabilities at which the draft continues (see the module
      docstring), in [0, 1]; with threshold 0 all tokens are proposed.
  """

  draft: ModelDraft
  threshold: float
  min_length: ClassVar[int] = 1  # the least number of proposed tokens

  def __post_init__(self):
    require_chain("a draft that stops early", self.draft.tree)
    object.__setattr__(self, "threshold", require_number("threshold", self.threshold, 0, 1))

  @property
  def tree(self) -> Tree:  # type: ignore[override]
    lengths = tuple(range(self.min_length, self.draft.tree.depth + 1))
    return dataclasses.replace(self.draft.tree, verify_lengths=lengths)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    return self.propose_above(self.threshold, params, state, context, rng)

  def proposes(
    self,
    threshold: float | Float[Array, " B"],
    reach: Float[Array, " B"],
    logits: Float[Array, "B V"],
  ) -> tuple[Bool[Array, " B"], Float[Array, " B"]]:
    """Return whether a token is proposed, and the value of `reach` for the token after it.

    Args:
      reach: value of the token before it; 1 for the first token.
      logits: logits of the model at the token, before processors.
    """
    return reach >= threshold, reach * confidence(logits)

  def propose_above(
    self,
    threshold: float | Float[Array, " B"],
    params: Any,
    state: Any,
    context: Context,
    rng: Keys,
  ) -> tuple[Proposal, Any]:
    """Propose with another threshold, which may differ between rows."""
    model, gamma = self.draft.model, self.tree.depth
    logits, cache = self.draft.start_round(params, state, context)
    keys = depth_keys(self.draft.options, context, rng, gamma)
    first, q, text = sample_next(self.draft, keys[0], context, logits)
    is_proposed, reach = self.proposes(threshold, jnp.ones(len(logits), jnp.float32), logits)
    tokens = jnp.full((len(logits), gamma), -1, jnp.int32)
    tokens = tokens.at[:, 0].set(jnp.where(is_proposed, first, -1))
    if q is not None:
      first_q = jnp.where(is_proposed[:, None], q, 0.0)
      q = jnp.zeros((*tokens.shape, logits.shape[-1]), jnp.float32).at[:, 0].set(first_q)

    def any_row_continues(carry):
      num_proposed, _, _, reach, *_ = carry
      return (num_proposed < gamma) & (reach >= threshold).any()

    def step(carry):
      num_proposed, cache, draft_token, reach, text, tokens, q = carry
      logits, _, cache = model.extend(params, cache, draft_token[:, None], self.tree, num_proposed)
      after = context._replace(tokens=text, length=context.length + num_proposed)
      draft_token, draft_token_q, text = sample_next(
        self.draft, keys[num_proposed], after, logits[:, 0]
      )
      is_proposed, reach = self.proposes(threshold, reach, logits[:, 0])
      tokens = tokens.at[:, num_proposed].set(jnp.where(is_proposed, draft_token, -1))
      if q is not None and draft_token_q is not None:
        q = q.at[:, num_proposed].set(jnp.where(is_proposed[:, None], draft_token_q, 0.0))
      return num_proposed + 1, cache, draft_token, reach, text, tokens, q

    carry = jnp.ones((), jnp.int32), cache, first, reach, text, tokens, q
    _, cache, *_, tokens, q = lax.while_loop(any_row_continues, step, carry)
    return Proposal(tokens, q), cache


class AdaptiveState(NamedTuple):
  """State of the draft, and the current threshold and recent acceptance rate of each row."""

  inner: Any
  threshold: Float[Array, " B"]
  rate: Float[Array, " B"]


@dataclasses.dataclass(frozen=True)
class AdaptiveStoppingDraft(StoppingDraft):
  """A draft whose threshold follows its recent acceptance (Draft & Verify; Zhang et al., 2024).

  The acceptance rate is a moving average over rounds of the share of proposed tokens that were
  accepted. After a round in which it is at most `goal`, the threshold rises by `step`; otherwise it
  falls by `step`. It stays in [0, 1]. Each text starts with the threshold `threshold`.

  Attributes:
    goal: acceptance rate to keep, in [0, 1].
    step: change of the threshold per round, in [0, 1].
    memory: weight of the earlier rounds in the moving average, in [0, 1].
  """

  goal: float = 0.7
  step: float = 0.05
  memory: float = 0.5
  depends_on_outcomes = True

  def __post_init__(self):
    super().__post_init__()
    for name in ("goal", "step", "memory"):
      object.__setattr__(self, name, require_number(name, getattr(self, name), 0, 1))

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> AdaptiveState:
    rows = jnp.ones(len(context.tokens), jnp.float32)
    inner = self.draft.init(params, context, hidden)
    return AdaptiveState(inner, self.threshold * rows, self.goal * rows)

  def propose(
    self, params: Any, state: AdaptiveState, context: Context, rng: Keys
  ) -> tuple[Proposal, AdaptiveState]:
    threshold = state.threshold
    proposal, inner = self.propose_above(threshold, params, state.inner, context, rng)
    return proposal, state._replace(inner=inner)

  def observe(self, params: Any, state: AdaptiveState, outcome: Outcome) -> AdaptiveState:
    num_proposed = (outcome.proposal.tokens >= 0).sum(axis=1, dtype=jnp.float32)
    of_round = outcome.verification.num_accepted / num_proposed
    rate = self.memory * state.rate + (1 - self.memory) * of_round
    threshold = state.threshold + jnp.where(rate <= self.goal, self.step, -self.step)
    inner = self.draft.observe(params, state.inner, outcome)
    return AdaptiveState(inner, jnp.clip(threshold, 0, 1), rate)


def confidence(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
  """Return the probability of the most probable token at temperature 1, without top-k or top-p."""
  return jnp.exp(-jax.nn.logsumexp(logits - logits.max(axis=-1, keepdims=True), axis=-1))
