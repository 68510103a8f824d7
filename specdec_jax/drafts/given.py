"""Texts that the caller expects as outputs, as drafts ("predicted outputs").

An editor, a translation memory, a translation of text that grows, or an interim transcript often
has most of an output before it is decoded. Its tokens are proposed from where the output has come
to. They are selected deterministically, so that outputs are exact at every temperature.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int

from specdec_jax.core.arrays import gather, gather_one
from specdec_jax.core.context import Context, PromptWithDraft
from specdec_jax.core.decode import NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import AnyTree, Tree, chain, require_chain
from specdec_jax.core.types import FILLER, Draft, DraftOptions, DraftSpec, Keys, Loaded, Proposal
from specdec_jax.drafts.composed import rereading
from specdec_jax.drafts.several import require_joinable

FIRST, LEAST, MOST = 8, 4, 32  # draft tokens: of the first round, of others, and at most
_SURE = 2  # tokens in a row that the text and the given text share, before given ones are proposed
_NUM_LAST = 3  # tokens of the text by which a place is found again
_NEAR = 8  # distance from the expected place at which fewer tokens suffice
_PATIENCE = 4  # tokens without a place after which all of them are needed
_REREAD = 8  # tokens that the other draft reads in a pass


class Place(NamedTuple):
  """Given tokens, and the place in them that the text has come to.

  Attributes:
    tokens: given tokens, padded at the end.
    length: number of given tokens.
    next: index of the given token that is expected next.
    missed: number of tokens at the end of the text for which no place was found.
    run: number of tokens before the end of the text that are the given ones without a gap.
    is_known: whether the given text has recently had tokens of the text.
    last: last tokens of the text; -1 before its beginning.
  """

  tokens: Int[Array, "B G"]
  length: Int[Array, " B"]
  next: Int[Array, " B"]
  missed: Int[Array, " B"]
  run: Int[Array, " B"]
  is_known: Bool[Array, " B"]
  last: Int[Array, "B last"]

  @classmethod
  def start(cls, tokens: Int[Array, "B G"], length: Int[Array, " B"]) -> "Place":
    """Return the place at the start of the given tokens."""
    zeros = jnp.zeros(len(tokens), jnp.int32)
    last = jnp.full((len(tokens), _NUM_LAST), -1, jnp.int32)
    return cls(tokens, length.astype(jnp.int32), zeros, zeros, zeros, zeros > 0, last)

  def after(self, new: Int[Array, "B M"], count: Int[Array, " B"], gamma: int = 0) -> "Place":
    """Return the place after the first `count` of new tokens of the text.

    If these are not the given tokens, the place is found again by the last tokens of the text: one
    suffices near the expected place, two elsewhere, and three are needed if the given text has had
    no part of the text for a while. Otherwise, the expected place is as far on as the text.

    Args:
      gamma: number of tokens that another draft proposes where no place is found. If there is one,
        a wrong place costs more, and one more token is needed.
    """
    size, i = self.tokens.shape[1], jnp.arange(new.shape[1])[None]
    expected = self.next[:, None] + i
    same = gather(self.tokens, jnp.minimum(expected, size - 1)) == new
    same &= (expected < self.length[:, None]) & (i < count[:, None])
    num_same = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    rest, run = count - num_same, self.run + num_same
    is_known = (run > 1) | self.is_known & (self.missed + rest <= _PATIENCE + 2 * gamma)
    last = gather(
      jnp.concatenate([self.last, new], axis=1), count[:, None] + jnp.arange(_NUM_LAST)[None]
    )

    num_equal, is_equal = jnp.zeros_like(self.tokens), jnp.arange(size)[None] < self.length[:, None]
    for n in range(_NUM_LAST):
      earlier = jnp.pad(self.tokens, ((0, 0), (n, 0)), constant_values=-2)[:, :size]
      is_equal &= earlier == last[:, _NUM_LAST - 1 - n, None]
      num_equal += is_equal
    index = self.next + count
    distance = jnp.abs(jnp.arange(1, size + 1)[None] - index[:, None])
    known = jnp.where(distance <= _NEAR, 1, 2) + (gamma > 0)
    needed = jnp.where(is_known[:, None], known, _NUM_LAST)
    score = jnp.where(num_equal >= needed, num_equal * 2 * size - distance, -1)
    best = score.argmax(axis=1)
    has_place = rest == 0
    is_found = ~has_place & (gather_one(score, best) >= 0)
    return self._replace(
      next=jnp.where(is_found, best.astype(jnp.int32) + 1, index),
      missed=jnp.where(has_place, self.missed * (count == 0), (self.missed + rest) * ~is_found),
      run=jnp.where(has_place, run, gather_one(num_equal, best) * is_found),
      is_known=is_known,
      last=last,
    )

  def after_text(self, tokens: np.ndarray) -> "Place":
    """Return the place of one row after tokens [T] of the text, on the host."""
    width = 1 << max(4, (len(tokens) - 1).bit_length())
    new = np.pad(tokens.astype(np.int32), (0, width - len(tokens)))[None]
    return _after(self, jnp.asarray(new), jnp.array([len(tokens)], jnp.int32))

  def rest(self, most: int) -> list[int]:
    """Return at most `most` given tokens of one row from its place on, or from a little before."""
    first = max(0, int(self.next[0]) - (2 * _NEAR if self.missed[0] else 0))
    return np.asarray(self.tokens[0, first : int(self.length[0])])[:most].tolist()

  def next_tokens(self, count: Int[Array, " B"], most: int) -> Int[Array, "B {most}"]:
    """Return the next `count` given tokens, then -1."""
    i = jnp.arange(most)[None]
    index = jnp.minimum(self.next[:, None] + i, self.tokens.shape[1] - 1)
    return jnp.where(i < count[:, None], gather(self.tokens, index), -1)

  def num_proposed(self, most: int, gamma: int = 0) -> Int[Array, " B"]:
    """Return the number of given tokens to propose, at most `most`; 0 if there is no place.

    It is doubled from round to round while all are accepted. After a single token that is not the
    given one, the next tokens are expected as if it had been replaced. If another draft proposes
    `gamma` tokens, that is done neither there nor at the start.
    """
    goes_on = self.missed == 0
    if gamma:
      goes_on &= self.run >= _SURE
    else:
      goes_on |= (self.missed == 1) & self.is_known
    wanted = jnp.clip(2 * self.run, jnp.where(self.next == 0, FIRST, LEAST), most)
    return jnp.clip(self.length - self.next, 0, wanted) * goes_on


_after = jax.jit(Place.after)


class _State(NamedTuple):
  """State of a `GivenDraft`.

  Attributes:
    num_seen: number of committed tokens at the last round, which `place` takes into account.
    of_draft: state of the other draft.
    num_read: number of committed tokens that the other draft had processed before the last round.
    has_drafted: whether it has proposed in the last round.
  """

  place: Place
  num_seen: Int[Array, " B"]
  of_draft: Any
  num_read: Int[Array, " B"]
  has_drafted: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class GivenDraft(Draft):
  """A draft that proposes the draft tokens of a `PromptWithDraft`, or those of another draft.

  In a round in which the text and the given text do not share the last tokens, the other draft
  proposes, and given tokens follow those of its tokens that are given ones. So a given text that
  does not fit costs little. The other draft runs only if a row needs it, and then first reads the
  tokens of the rounds in which it did not run. The parameters are its own. The target forward pass
  is cut to the longest proposal of all rows.

  Attributes:
    draft: the other draft, which proposes a chain; `NullDraft()` for none.
    late: the same draft with `DraftOptions.reread` for tokens of rounds in which it did not run.
    gamma: maximum number of given tokens per round.
    special: mask [V] of tokens that given texts do not have, such as timestamps. They are skipped
      when texts are compared.
    may_stop: whether draft tokens may be -1 (`DraftOptions.may_stop`).
  """

  draft: Draft
  late: Draft
  gamma: int
  vocab_size: int
  special: HashableArray
  may_stop: bool = True
  depends_on_outcomes = True  # by the lengths of earlier rounds

  def __post_init__(self):
    if self.draft.tree.num_draft_tokens:
      require_chain("a draft for rows without given tokens", self.draft.tree)
    require_joinable(self.draft)

  @property
  def tree(self) -> Tree:  # type: ignore[override]
    depth, least = max(self.gamma, self.draft.tree.depth), self.draft.tree.depth
    if not self.may_stop:
      return chain(depth)
    powers = (n for n in (4, 8, 16, 32) if least < n < depth)
    return dataclasses.replace(chain(depth), verify_lengths=(*sorted({least, *powers, depth}),))

  def init(self, params: Any, context: Context, hidden: Array) -> _State:
    prompt = context.prompt
    if not isinstance(prompt, PromptWithDraft):  # no row has given tokens
      none = jnp.zeros((len(prompt), 1), jnp.int32)
      prompt = PromptWithDraft(prompt, none, none[:, 0])
    place = Place.start(jnp.asarray(prompt.draft), jnp.asarray(prompt.draft_length))
    state = self.draft.init(params, context._replace(prompt=prompt.prompt), hidden)
    has_drafted = jnp.zeros(len(prompt), bool)
    return _State(place, context.length, state, context.length - 1, has_drafted)

  def propose(
    self, params: Any, state: _State, context: Context, rng: Keys
  ) -> tuple[Proposal, Any]:
    depth, length = self.tree.depth, context.length
    place = self._place(state, context)
    assert context.prompt_length is not None
    is_free = length >= context.prompt_length  # not in a forced prefix
    count = place.num_proposed(depth, self.draft.tree.depth) * is_free
    given = place.next_tokens(count, depth)
    # Of its own tokens, the other draft has processed all but the last.
    own = jnp.minimum(length - state.num_seen, self.draft.tree.depth) - 1
    num_read = jnp.where(state.has_drafted, state.num_seen + own, state.num_read)
    state = state._replace(place=place, num_seen=length, num_read=num_read)
    proposal, state = self._with_draft(params, state, context, rng, Proposal(given))
    if self.may_stop:
      return proposal, state
    return proposal._replace(tokens=jnp.where(proposal.tokens < 0, FILLER, proposal.tokens)), state

  def _place(self, state: _State, context: Context) -> Place:
    """Return the place at the end of the text, which has at most `depth + 1` new tokens."""
    assert context.prompt_length is not None
    first, i = jnp.maximum(state.num_seen, context.prompt_length), jnp.arange(self.tree.depth + 1)
    slots = first[:, None] + i[None]
    new = gather(context.tokens, jnp.minimum(slots, context.tokens.shape[1] - 1))
    counts = slots < context.length[:, None]
    if self.special.array.any():
      counts &= ~jnp.asarray(self.special)[new]
      place = jnp.where(counts, jnp.cumsum(counts, axis=1) - 1, -1)
      new = jnp.where(place[:, None] == i[None, :, None], new[:, None], 0).sum(axis=2)
    return state.place.after(new, counts.sum(axis=1, dtype=jnp.int32), self.draft.tree.depth)

  def _with_draft(
    self, params: Any, state: _State, context: Context, rng: Keys, given: Proposal
  ) -> tuple[Proposal, _State]:
    """Return the proposal in which the other draft proposes for rows without given tokens."""
    gamma = self.draft.tree.depth
    if not gamma:
      return self._with_q(given, None), state
    is_given = given.tokens[:, :1] >= 0

    def is_behind(num_read: Array, least: int) -> Array:
      return ~is_given[:, 0] & (num_read <= context.length - least)

    def read(draft: Draft, least: int, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
      *before, num_read = carry
      rows = is_behind(num_read, least)  # others do not change, so that rows are independent
      length = jnp.where(rows, jnp.minimum(context.length, num_read + _REREAD), num_read)
      after = draft.propose(params, before[1], context._replace(length=length), rng)
      if len(rows) > 1:
        after = jax.tree.map(functools.partial(_of_rows, rows), after, (*before,))
      return *after, length

    proposed = functools.partial(self.draft.propose, params)
    shapes, _ = jax.eval_shape(proposed, state.of_draft, context, rng)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = none, state.of_draft, state.num_read
    for draft, least in ((self.late, 3), (self.draft, 1)):
      is_any = functools.partial(lambda least, x: is_behind(x[2], least).any(), least)
      carry = lax.while_loop(is_any, functools.partial(read, draft, least), carry)
    own, of_draft, num_read = carry
    has_drafted = ~is_given[:, 0]
    state = state._replace(of_draft=of_draft, num_read=num_read, has_drafted=has_drafted)
    more = given.tokens.shape[1] - gamma
    after = state.place.after(own.tokens, jnp.full(len(own.tokens), gamma), gamma)
    following = after.next_tokens(after.num_proposed(more, gamma), more)
    own_tokens = jnp.concatenate([own.tokens, following], axis=1)
    tokens = jnp.where(is_given, given.tokens, own_tokens)
    return self._with_q(Proposal(tokens, own.q), is_given), state

  def _with_q(self, proposal: Proposal, is_given: Array | None) -> Proposal:
    """Return the proposal with q for all tokens: one-hots, except those of the other draft."""
    if proposal.q is None:
      return proposal
    assert is_given is not None
    tokens = jnp.where(proposal.tokens < 0, FILLER, proposal.tokens)
    one_hots = jax.nn.one_hot(tokens, self.vocab_size, dtype=jnp.float32)
    missing = tokens.shape[1] - proposal.q.shape[1]
    is_sampled = ~is_given & (jnp.arange(tokens.shape[1]) < proposal.q.shape[1])[None]
    q = jnp.pad(proposal.q, ((0, 0), (0, missing), (0, 0)))
    return proposal._replace(q=jnp.where(is_sampled[..., None], q, one_hots))


def _of_rows(rows: Bool[Array, " B"], new: Array, old: Array) -> Array:
  """Return `new` in these rows, and `old` in others. Rows of several samples may share arrays."""
  if new is old:  # such as keys and values of the source
    return new
  return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def given_draft(spec: DraftSpec, inner: AnyTree, target: Loaded) -> DraftSpec:
  """Return a draft that proposes given tokens, or else a chain of `spec`'s draft.

  The depth of the tree that it is built for is the maximum number of given tokens per round.

  Args:
    inner: tree of the other draft; without draft tokens, there is none.
  """
  special = special_tokens(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> GivenDraft:
    draft: Draft = NullDraft()
    late = draft
    if inner.num_draft_tokens:
      draft = spec.build(sampling, inner, options)
      late = spec.build(sampling, inner, rereading(options, _REREAD))
    size = target.model.vocab_size
    return GivenDraft(draft, late, tree.depth, size, special, options.may_stop)

  name = f"given texts and {spec.name}" if inner.num_draft_tokens else "given texts"
  return dataclasses.replace(spec, name=name, build=build, path=None)


def special_tokens(target: Loaded) -> HashableArray:
  """Return a mask [V] of the tokens that the texts of a target do not have, except EOS."""
  size, words = target.model.vocab_size, target.vocabulary
  special = np.zeros(size, bool)
  special[[i for i in words.special_ids if i < size]] = True
  if target.speech is not None:  # timestamps and other tokens follow those of texts
    special[words.eos_id :] = True
  special[words.eos_id] = False
  return HashableArray(special)
