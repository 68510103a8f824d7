"""A draft that is trained while it serves (online speculative decoding; Liu et al., 2024).

Verification computes the target's distribution at each draft token up to the first rejected one.
After each round, the compiled decoding program also runs one optimizer step, which moves the draft
towards these distributions. Outputs keep the target's distribution, because the q of a draft token
is computed with the same parameters that the token was sampled with.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.decode import Decoder
from specdec_jax.core.trees import require_chain
from specdec_jax.core.types import Context, DecodeResult, Outcome, Params, Proposal
from specdec_jax.core.wrappers import WrappedDraft
from specdec_jax.drafts.heads.base import Source
from specdec_jax.drafts.heads.stateless import SpeculatorDraft, source_of
from specdec_jax.errors import InputError
from specdec_jax.models.families import module_of


class LearnedState(NamedTuple):
  """State of an online draft that is carried from one batch of texts to the next.

  Attributes:
    params: current parameters of the draft head.
    opt_state: state of the optimizer.
  """

  params: Any
  opt_state: Any


class OnlineState(NamedTuple):
  """State of an `OnlineDraft` within a batch of texts.

  Attributes:
    learned: state that is carried from one batch to the next.
    source: cross-attention keys and values of the target's last layer, and their bias; (None, None)
      if the target has no encoder.
    hidden: the target's hidden state from which this round was drafted.
    last_token: last committed token before this round.
  """

  learned: LearnedState
  source: Source
  hidden: Float[Array, "B E"]
  last_token: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class OnlineDraft(WrappedDraft):
  """A draft that proposes chains with a learned head, and trains it on the outcome of each round.

  Its parameters are a pair: the `LearnedState`, and the target's parameters that the head uses. All
  rows of a batch train the same parameters, so their samples are not independent, but each row
  keeps the target's distribution.

  Attributes:
    draft: draft that proposes with the head.
    learning_rate: learning rate of Adafactor, which is the size of an update relative to the
      parameter.

  Raises:
    InputError: the tree is not a chain, or the head uses kernels that have no gradient.
  """

  draft: SpeculatorDraft
  learning_rate: float = 0.003
  depends_on_outcomes = True

  def __post_init__(self):
    require_chain("a draft that learns", self.draft.tree)
    if self.draft.head.config.kernels != "xla":
      raise InputError(
        "A draft that learns needs kernels='xla', since `kernels.skinny` has no gradient."
      )

  def initial_state(self, params: Any) -> LearnedState:
    """Return the state before the first batch, from the initial parameters of the head."""
    return LearnedState(params, self._optimizer.init(params))

  def init(self, params: Any, context: Context, hidden: Array) -> OnlineState:
    learned, _ = params
    source = source_of(self.draft.head.config, context)
    return OnlineState(learned, source, context.hidden, context.last_token)

  def propose(
    self, params: Any, state: OnlineState, context: Context, rng: Array
  ) -> tuple[Proposal, OnlineState]:
    _, target_params = params
    proposal, _ = self.draft.propose((state.learned.params, target_params), (), context, rng)
    return proposal, state._replace(hidden=context.hidden, last_token=context.last_token)

  def observe(self, params: Any, state: OnlineState, outcome: Outcome) -> OnlineState:
    _, target_params = params
    guesses, gamma = outcome.proposal.tokens, self.tree.depth
    previous = jnp.concatenate([state.last_token[:, None], guesses[:, :-1]], axis=1)
    p = jax.nn.softmax(outcome.logits[:, :gamma].astype(jnp.float32))
    # Train on the verified draft tokens of rows that are not done: the accepted ones and the first
    # rejected one.
    is_verified = jnp.arange(gamma) <= outcome.verification.num_accepted[:, None]
    weight = is_verified & (outcome.num_emitted > 0)[:, None]
    module, target_module = self.draft.head.module, module_of(self.draft.target)

    def project(hidden: Array) -> Array:
      return target_module.apply({"params": target_params}, hidden, method="logits")

    def loss(head_params) -> Array:
      logits = module.apply({"params": head_params}, state.hidden, previous, state.source, project)
      cross_entropy = -(p * jax.nn.log_softmax(logits.astype(jnp.float32))).sum(axis=-1)
      return (cross_entropy * weight).sum() / jnp.maximum(weight.sum(), 1)

    head_params, opt_state = state.learned
    updates, opt_state = self._optimizer.update(jax.grad(loss)(head_params), opt_state, head_params)
    return state._replace(
      learned=LearnedState(optax.apply_updates(head_params, updates), opt_state)
    )

  @property
  def _optimizer(self) -> optax.GradientTransformation:
    return optax.adafactor(self.learning_rate)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def decode_and_learn(
  decoder: Decoder,
  params: Params,
  prompt: Int[Array, "B P"],
  rng: Key[Array, " B"],
  *,
  max_new_tokens: int,
) -> tuple[DecodeResult, LearnedState]:
  """Decode a batch like `Decoder.run`; also return the `LearnedState` after the batch."""
  state = decoder.init(params, prompt, rng, max_new_tokens)
  state = decoder.run_rounds(params, state)
  return decoder.result(state), state.draft_state.learned
