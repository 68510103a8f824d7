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

from specdec_jax.core.decode import all_rounds, decoded, one_round, start
from specdec_jax.core.trees import Tree, require_chain
from specdec_jax.core.types import Context, DecodeResult, Draft, Model, Outcome, Proposal, Verifier
from specdec_jax.drafts.speculator import SpeculatorDraft, source_of
from specdec_jax.errors import InputError
from specdec_jax.models.families import module_of
from specdec_jax.models.speculator import Source, in_rows


class Learnt(NamedTuple):
  """What goes from text to text.

  Attributes:
    own: the module's parameters. optimizer: its state.
  """

  own: Any
  optimizer: Any


class _State(NamedTuple):
  """Within a text: what is learnt, and what the guesses of this round were made from."""

  learnt: Learnt
  source: Source
  hidden: Array
  newest: Array


@dataclasses.dataclass(frozen=True)
class OnlineDraft(Draft):
  """A chain of a module that learns; its parameters are a pair, (`Learnt`, the target's).

  Rows of a batch share what they learn, so their draws depend on each other; their law does not.

  Attributes:
    draft: the module's. learning_rate: of Adafactor, the relative size of an update.

  Raises:
    InputError: the tree is no chain, or products are by kernels that have no gradient.
  """

  draft: SpeculatorDraft
  learning_rate: float = 0.003
  tree: Tree = dataclasses.field(init=False)
  learns = True

  def __post_init__(self):
    require_chain("a draft that learns", self.draft.tree)
    if self.draft.config.kernels != "xla":
      raise InputError("A draft that learns wants kernels='xla': `kernels.skinny` has no gradient.")
    object.__setattr__(self, "tree", self.draft.tree)

  def begin(self, own: Any) -> Learnt:
    """Nothing learnt yet, from parameters to begin with."""
    return Learnt(own, self._optimizer.init(own))

  def start(self, params: Any, context: Context, hidden: Array) -> _State:
    source = source_of(self.draft.config, context)
    return _State(params[0], source, context.hidden, context.newest)

  def propose(
    self, params: Any, state: _State, context: Context, rng: Array
  ) -> tuple[Proposal, _State]:
    now = state.learnt.own, params[1]
    proposal, _ = self.draft.propose(now, (), context, rng)
    return proposal, state._replace(hidden=context.hidden, newest=context.newest)

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

    own, optimizer = state.learnt
    updates, optimizer = self._optimizer.update(jax.grad(loss)(own), optimizer, own)
    return state._replace(learnt=Learnt(optax.apply_updates(own, updates), optimizer))

  @property
  def _optimizer(self) -> optax.GradientTransformation:
    return optax.adafactor(self.learning_rate)


@functools.partial(
  jax.jit, static_argnames=("target", "draft", "max_new_tokens", "verifier", "eos_id")
)
def decode_and_learn(
  target: Model,
  draft: OnlineDraft,
  target_params: Any,
  draft_params: Any,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  verifier: Verifier,
  eos_id: int,
) -> tuple[DecodeResult, Learnt]:
  """As `decoding.speculative_decode`, with keys rng [B]; and what the draft has learnt since."""
  models = target, draft, target_params, draft_params
  step = functools.partial(one_round, *models, verifier, rng, eos_id)
  state = all_rounds(step, start(*models, prompt, max_new_tokens))
  return decoded(state), state.draft.learnt
