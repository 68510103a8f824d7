"""What models, drafts and rules promise, and the records that travel between them and the loops.

Axes used throughout: B batch, N guesses of a round, K = N + 1 tokens in a block, D depth of a tree
(gamma of a chain), P prompt tokens, C committed ones before the first round, T slots of a cache,
R rounds, E embed, V vocabulary.

A model, a draft or a verifier is a frozen dataclass that says what it is made of: equal ones hash
alike, so what was compiled for one serves all. Parameters and state are arguments, never fields.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyNodes, AnyTree, DynamicTree
from specdec_jax.errors import InputError, shown


class Model(Protocol):
  """An autoregressive model that reads blocks of tokens at each row's own position.

  The invariant of the loops: a cache of length L holds every committed token but the newest,
  which is the first of the next block. `extend` writes slots past the length and leaves it;
  `commit` alone moves it. Slots at or past it are masked, then overwritten: that is the rollback.

  Attributes:
    vocab_size: V.
    eos_id: ends a text, unless whoever decodes says otherwise.
  """

  @property
  def vocab_size(self) -> int: ...
  @property
  def eos_id(self) -> int: ...

  def prompt_tokens(self, prompt: Array) -> tuple[Array, Array]:
    """What is committed before the first round: tokens [B, C] and how many [B].

    T5: its start token; a decoder-only model: the prompt [B, P]. A prompt is, for both, tokens, EOS
    and padding, as `Vocabulary.encode` gives them; rows may be of different lengths.
    """

  def prefill(self, params: Any, prompt: Array, num_slots: int) -> tuple[Array, Any]:
    """Read the prompt: hidden states [B, C, E] of its tokens, and the cache, which has a `length`
    [B] and holds all of them but the newest.

    num_slots leaves room for the last block past the end of the text, so no write is ever clamped
    into live slots.
    """

  def extend(
    self,
    params: Any,
    cache: Any,
    tokens: Array,
    tree: AnyNodes | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, Any]:
    """Read a block tokens [B, k]: logits [B, k, V] of what follows each, their hidden states
    [B, k, E], and the cache with them in the slots from length + first on.

    The block is nodes first..first+k-1 of `tree`, whose earlier nodes lie in the slots before, or
    of a chain if there is none. `first` may be traced for a chain, and for nodes that are `Placed`.
    """

  def commit(
    self, cache: Any, length: Array, tree: AnyTree | None = None, path: Array | None = None
  ) -> Any:
    """The cache when it holds `length` [B] tokens.

    Of a block that was a tree, the nodes `path` [B, D] are moved behind what was committed before;
    of a chain what is kept lies there already.
    """


class Context(NamedTuple):
  """What a draft may read.

  Attributes:
    prompt: [B, P].
    tokens: [B, T], the committed ones first. length: [B], how many.
    target: the target's cache.
    hidden: [B, E], the target's last state where it chose the newest token; 0 if it chose none yet.
  """

  prompt: Array
  tokens: Array
  length: Array
  target: Any
  hidden: Array

  @property
  def newest(self) -> Array:
    """The last committed token of each row, [B]."""
    return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]


class Proposal(NamedTuple):
  """Guesses, and how they came about.

  Attributes:
    tokens: [B, N]; -1 for a guess that was not made.
    q: [B, N, V], the very distribution that each guess was drawn from, given its ancestors and its
      elder siblings: exactness rests on it. None if all were chosen without chance, in which case
      the guess is certain.
    tree: the shape of this round's, where it is another in each; None if it is the draft's.
  """

  tokens: Array
  q: Array | None = None
  tree: DynamicTree | None = None


class Verification(NamedTuple):
  """One round judged.

  Attributes:
    num_accepted: [B], n, guesses that stand, 0..D.
    next_token: [B], the token after them: the correction, or the bonus if n = D.
    path: [B, D], the accepted nodes, 0 past n. None for a chain, whose n nodes are 1..n.
  """

  num_accepted: Array
  next_token: Array
  path: Array | None = None


class Outcome(NamedTuple):
  """What became of a proposal.

  Attributes:
    proposal: as the draft made it.
    logits: of the target at each node, [B, K, V]. hidden: its last states there, [B, K, E].
    verification: of the verifier.
    num_emitted: [B], tokens that entered the text: n + 1, less what fell past EOS or the limit.
    length: [B], committed tokens after the round.
  """

  proposal: Proposal
  logits: Array
  hidden: Array
  verification: Verification
  num_emitted: Array
  length: Array


class Draft(abc.ABC):
  """An approximation model M_q (Section 3.6): proposes a tree of guesses and says how it drew them.

  Attributes:
    tree: the shape of what it proposes; of a shape that changes, its sizes.
    widths: of a chain that may end early, with -1 for guesses not made: the numbers of guesses that
      the target has a pass for, ascending, gamma the last; none if all are always made.
    learns: whether what it proposes depends on outcomes, not on the text alone, so that nothing can
      be said of it over a given text.
  """

  tree: AnyTree
  widths: tuple[int, ...] = ()
  learns: bool = False

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    """The state before the first round; `hidden` [B, C, E] is the target's of the prompt.

    By default there is none.
    """
    return ()

  @abc.abstractmethod
  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    """Guesses after the committed tokens, with keys rng [B], and the state.

    A draft that copies needs no state and one with a cache rolls back by itself.
    """

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    """The state after a round was judged; by default as it was."""
    return state


class DraftFactory(NamedTuple):
  """An approximation model M_q, loaded: what a pair needs of it. A vocabulary -> DraftFactory is what
  `pairs.load_pair` takes as draft.

  Attributes:
    name: for records.
    build: (sampling, tree) -> the draft.
    params: arguments of the compiled programs, never constants in them.
    path: its checkpoint, for records; None if it has none, or is made of several.
  """

  name: str
  build: Callable[[Sampling, AnyTree], Draft]
  params: Any = ()
  path: str | None = None


class OnTarget(NamedTuple):
  """In place of a `DraftFactory`: a draft that is made of its target.

  Attributes:
    drafter: (target, its parameters) -> the draft, loaded.
  """

  drafter: Callable[[Model, Any], DraftFactory]


EITHER = DraftFactory, OnTarget  # kinds for `drafter_from`


def drafter_from(
  draft: Callable[[Any], Any], vocabulary: Any, kinds: tuple[type, ...] = (DraftFactory,)
) -> Any:
  """Call a function of a vocabulary that a user gave as draft.

  Args:
    draft: the function.
    vocabulary: of the pair.
    kinds: what it may return.

  Raises:
    InputError: it returns something else.
  """
  made = draft(vocabulary)
  if not isinstance(made, kinds):
    raise InputError(
      f"The function given as draft returns {shown(made)} for a vocabulary; it must return a "
      f"{' or '.join(kind.__name__ for kind in kinds)} (specdec_jax.core.types)."
    )
  return made


def made_for(drafter: DraftFactory | OnTarget, target: Model, params: Any) -> DraftFactory:
  """The draft for a target with these parameters."""
  return drafter.drafter(target, params) if isinstance(drafter, OnTarget) else drafter


class Verifier(Protocol):
  """How guesses are judged, so that what is emitted is distributed as the target.

  Attributes:
    sampling: how the target's logits become p.
  """

  @property
  def sampling(self) -> Sampling: ...

  @property
  def exact(self) -> bool:
    """Whether the output is the target's own."""

  def accept(self, rng: Array, tree: AnyTree, proposal: Proposal, logits: Array) -> Verification:
    """Judge a proposal by the target's logits [B, K, V] at its nodes, with keys rng [B]."""


class Rounds(NamedTuple):
  """What happened in each round, in fixed shape; rows past their end have num_emitted 0.

  Attributes:
    guesses: [R, B, N]; -1 for those not made, where gamma changes (`adaptive`).
    num_accepted: [R, B], n of the verification.
    next_token: [R, B].
    num_emitted: [R, B], tokens that entered the text: n + 1, less what fell past EOS or the limit.
    path: [R, B, D], accepted nodes, 0 past n; None for chains.
    parents: [R, B, N], where the shape of the tree changes: the node that each guess follows.
  """

  guesses: Array
  num_accepted: Array
  next_token: Array
  num_emitted: Array
  path: Array | None = None
  parents: Array | None = None

  def judged(self) -> tuple[Array, Array]:
    """Accepted and rejected guesses of each row, [B] both; one behind EOS or the limit was neither.

    alpha's empirical counterpart is accepted / (accepted + rejected). Of a tree, whose guesses are
    not all visited, an accepted guess counts with its elder siblings as one, and so do siblings
    all rejected.
    """
    n, emitted = self.num_accepted, self.num_emitted
    depth = (self.guesses >= 0).sum(axis=-1) if self.path is None else self.path.shape[-1]
    rejected = (n < depth) & (emitted == n + 1)
    return n.clip(None, emitted).sum(axis=0), rejected.sum(axis=0)


class DecodeResult(NamedTuple):
  """A decoded batch.

  Attributes:
    tokens: [B, T] new tokens with EOS, 0 past the end.
    lengths: [B] tokens in each row, EOS counted.
    rounds: one record a round.
    num_rounds: [], rounds that ran; each is one pass of the target.
    not_finite: [B], the token that was not decoded because a logit of the target or a probability
      of the draft was NaN or infinite; -1 if all were finite. The row ends before it.
  """

  tokens: Array
  lengths: Array
  rounds: Rounds
  num_rounds: Array
  not_finite: Array
