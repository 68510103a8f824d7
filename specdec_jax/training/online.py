"""A draft that learns while it serves: from each round, what the target thought of its guesses.

Online speculative decoding (Liu et al., 2024): the pass that judges guesses gives the target's
distribution at each of them, up to the first that is refused, at no cost. One step of the optimiser
a round moves the draft there, in the program that decodes. Texts stay the target's own: q is always
that of the parameters a guess was drawn with.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int, Key

from specdec_jax.core.decode import Decoder
from specdec_jax.core.trees import require_chain
from specdec_jax.core.types import Context, DecodeResult, Outcome, Params, Proposal, WrappedDraft
from specdec_jax.drafts.speculator import SpeculatorDraft, source_of
from specdec_jax.errors import InputError
from specdec_jax.models.families import module_of
from specdec_jax.models.speculator import Source, in_rows


class LearnedState(NamedTuple):
  """What goes from text to text.

  Attributes:
    own: the module's parameters. optimizer: its state.
  """

  own: Any
  optimizer: Any


class _State(NamedTuple):
  """Within a text: what is learned, and what the guesses of this round were made from."""

  learned: LearnedState
  source: Source
  hidden: Array
  newest: Array


@dataclasses.dataclass(frozen=True)
class OnlineDraft(WrappedDraft):
  """A chain of a module that learns; its parameters are a pair, (`LearnedState`, the target's).

  Rows of a batch share what they learn, so their draws depend on each other; their law does not.

  Attributes:
    draft: the module's. learning_rate: of Adafactor, the relative size of an update.

  Raises:
    InputError: the tree is no chain, or products are by kernels that have no gradient.
  """

  draft: SpeculatorDraft
  learning_rate: float = 0.003
  depends_on_outcomes = True

  def __post_init__(self):
    require_chain("a draft that learns", self.draft.tree)
    if self.draft.config.kernels != "xla":
      raise InputError("A draft that learns wants kernels='xla': `kernels.skinny` has no gradient.")

  def begin(self, own: Any) -> LearnedState:
    """Nothing learned yet, from parameters to begin with."""
    return LearnedState(own, self._optimizer.init(own))

  def init(self, params: Any, context: Context, hidden: Array) -> _State:
    source = source_of(self.draft.config, context)
    return _State(params[0], source, context.hidden, context.last_token)

  def propose(
    self, params: Any, state: _State, context: Context, rng: Array
  ) -> tuple[Proposal, _State]:
    now = state.learned.own, params[1]
    proposal, _ = self.draft.propose(now, (), context, rng)
    return proposal, state._replace(hidden=context.hidden, newest=context.last_token)

  def observe(self, params: Any, state: _State, outcome: Outcome) -> _State:
    guesses, gamma = outcome.proposal.tokens, self.tree.depth
    before = jnp.concatenate([state.newest[:, None], guesses[:, :-1]], axis=1)
    p = jax.nn.softmax(outcome.logits[:, :gamma].astype(jnp.float32))
    # What was judged, of rows that are not done: those accepted, and the first refused.
    judged = jnp.arange(gamma) <= outcome.verification.num_accepted[:, None]
    weight = judged & (outcome.num_emitted > 0)[:, None]
    module, of_target = in_rows(self.draft.config), module_of(self.draft.target)
    project = lambda x: of_target.apply({"params": params[1]}, x, method="logits")

    def loss(own) -> Array:
      logits = module.apply({"params": own}, state.hidden, before, state.source, project)
      cross_entropy = -(p * jax.nn.log_softmax(logits.astype(jnp.float32))).sum(axis=-1)
      return (cross_entropy * weight).sum() / jnp.maximum(weight.sum(), 1)

    own, optimizer = state.learned
    updates, optimizer = self._optimizer.update(jax.grad(loss)(own), optimizer, own)
    return state._replace(learned=LearnedState(optax.apply_updates(own, updates), optimizer))

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
  """Decode a batch as `Decoder.run` does, and return what its `OnlineDraft` has learned since."""
  state = decoder.init(params, prompt, rng, max_new_tokens)
  state = decoder.run_rounds(params, state)
  return decoder.result(state), state.draft_state.learned
