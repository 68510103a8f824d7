"""Scores of what happens in rounds: of each guess, its acceptance and the token after it.

q is what the draft reports of its guesses; p comes from a parallel pass of the target over the text
that was decoded, never from the loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.decode import Decoder, require_finite
from specdec_jax.core.sampling import Sampling, distribution, row_keys
from specdec_jax.core.trees import Tree, require_static
from specdec_jax.core.types import (
  Context,
  DecodeResult,
  Model,
  Outcome,
  Params,
  Proposal,
  WrappedDraft,
)
from specdec_jax.exactness.drift import FLOOR, Judged, Scores, joined
from specdec_jax.measurement.alpha import teacher_forced_logits
from specdec_jax.pairs import Pair

Decode = Callable[..., tuple[DecodeResult, "Tried"]]  # (prompt [B, P], keys [B], max_new_tokens=)


class Tried(NamedTuple):
  """The guesses made at each token of a text: of the node it follows, the children by rank.

  Attributes:
    start: [B, T], slot of the buffer at which the round began.
    position: [B, T, W], see `positions`; -1 for a child that the node does not have, or that the
      draft did not propose.
    tokens: [B, T, W].
    q: [B, T, W, V], as reported; 0 for a child that the node does not have.
    accepted: [B, T, W], whether it is the one that stands.
  """

  start: Array
  position: Array
  tokens: Array
  q: Array
  accepted: Array


def positions(tree: Tree) -> list[int]:
  """Where each guess [N] is judged in a round: its number among the tree's pairs (depth, rank).

  Of a chain its number, from 0.
  """
  places = [*zip(tree.depths[1:].tolist(), tree.ranks.tolist())]
  return [sorted({*places}).index(place) for place in places]


def token_by_token(p: Array, q: Array, guesses: Array) -> tuple[Array, Array]:
  """Of the guesses [..., W] at a node the probability [..., W] that each is accepted once its elder
  siblings were refused, and weights [..., V] of the token if all are.

  r begins as p [..., V]; a guess x from q [..., W, V] has min(1, r(x) / q(x)), and r becomes
  norm(max(0, r - q)) when it is refused. Where there is no guess q is 0, and r stays. With one
  guess that is Algorithm 1 (Section 2.3). Nothing here is `rules.tokens`'s, which is checked.
  """
  r, probabilities = p, []
  for rank in range(guesses.shape[-1]):
    if rank:
      r = r / r.sum(axis=-1, keepdims=True)
    law = q[..., rank, :]
    r_x, q_x = (jnp.take_along_axis(x, guesses[..., rank, None], axis=-1)[..., 0] for x in (r, law))
    probabilities.append(jnp.where(r_x < q_x, r_x / q_x, 1.0))
    left = jnp.maximum(r - law, 0.0)
    r = jnp.where(left.any(axis=-1, keepdims=True), left, r)
  return jnp.stack(probabilities, axis=-1), r


def recorded(pair: Pair, sampling: Sampling, tree: Tree, eos_id: int | None = None) -> Decode:
  """Return a function that decodes as `pair.decoder` does, and also returns the tried tokens.

  The rounds are those of the decoding loop; the draft records what it reports and what it observes.
  """
  draft = RecordingDraft(pair.draft(sampling, tree), pair.target.vocab_size)
  eos_id = pair.vocabulary.eos_id if eos_id is None else eos_id
  decoder = Decoder(pair.target, draft, pair.verifier_for(sampling), eos_id)
  return functools.partial(_recorded_decode, decoder, pair.params)


@dataclasses.dataclass(frozen=True)
class RecordingDraft(WrappedDraft):
  """The same draft, whose state holds what was tried at every slot too.

  A slot past the text is written again by the next round, as a cache is.

  Attributes:
    draft: as it is. vocab_size: V.
  """

  vocab_size: int

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    own = self.draft.init(params, context, hidden)
    tree = require_static("recording", self.tree)
    slots = *context.tokens.shape, tree.width
    none, q = jnp.zeros(slots, jnp.int32), jnp.zeros((*slots, self.vocab_size))
    return own, Tried(none[..., 0], none, none, q, jnp.zeros(slots, bool))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    own, tried = state
    proposal, own = self.draft.propose(params, own, context, rng)
    return proposal, (own, tried)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    own, tried = state
    tree = require_static("recording", self.tree)
    (tokens, q, _), path = outcome.proposal, outcome.verification.path
    if q is None:
      q = jax.nn.one_hot(tokens, self.vocab_size)
    if path is None:
      i = jnp.arange(tree.depth)
      path = jnp.where(i < outcome.verification.num_accepted[:, None], i + 1, 0)
    rows = jnp.arange(len(tokens))[:, None, None]
    # The children [B, D + 1, W] of the newest token and of the nodes that stand; N for none.
    children = jnp.asarray(tree.children)[jnp.pad(path, ((0, 0), (1, 0)))]
    begin = outcome.length - outcome.num_emitted
    guesses = tokens.at[rows, children].get(mode="clip")
    position = jnp.asarray([*positions(tree), -1], jnp.int32)[children]
    of_round = Tried(
      jnp.broadcast_to(begin[:, None], children.shape[:2]),
      jnp.where(guesses < 0, -1, position),  # one that the draft did not make
      guesses,
      q.at[rows, children].get(mode="fill", fill_value=0.0),
      children + 1 == jnp.pad(path, ((0, 0), (0, 1)))[..., None],
    )
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))
    put = lambda all_, new: write(all_, new.astype(all_.dtype), begin)
    own = self.draft.observe(params, own, outcome)
    return own, jax.tree.map(put, tried, of_round)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def _recorded_decode(
  decoder: Decoder, params: Params, prompt: Array, rng: Array, *, max_new_tokens: int
) -> tuple[DecodeResult, Tried]:
  state = decoder.init(params, prompt, rng, max_new_tokens)
  state = decoder.run_rounds(params, state)
  rows = jnp.arange(len(prompt))[:, None]
  slots = state.prompt_length[:, None] + jnp.arange(max_new_tokens)
  return decoder.result(state), jax.tree.map(lambda x: x[rows, slots], state.draft_state[1])


def judge_rounds(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  num_guesses: int,
  max_new_tokens: int,
  seed: int,
  batch_size: int = 32,
) -> Judged:
  """Decode the texts, again and again if need be, until `num_guesses` guesses have been judged.

  Args:
    pair: its target gives p, in one parallel pass over what was decoded.
    texts: sources.
    sampling: how p is adjusted.
    decode: see `recorded`.
    num_guesses: at least so many; when to stop depends on the past alone, so means stay 0.
    max_new_tokens: limit for each output.
    seed: of the draws.
    batch_size: rows decoded together; q alone takes 4 V W bytes for each of their tokens.
  """
  prompts, found, count, at = pair.prompt(texts), [], 0, 0
  while count < num_guesses:
    prompt = prompts[np.arange(at, at + batch_size) % len(texts)]
    result, tried = decode(prompt, row_keys(seed, at, batch_size), max_new_tokens=max_new_tokens)
    longest = -(-int(require_finite(result).lengths.max()) // 32) * 32  # few widths, few programs
    tokens, tried = result.tokens[:, :longest], Tried(*(x[:, :longest] for x in tried))
    scores = _scores(pair.target, pair.target_params, prompt, tokens, tried, sampling)
    visited, judged = jax.tree.map(lambda x: np.asarray(x, float), scores)
    written = np.arange(tokens.shape[1]) < np.asarray(result.lengths)[:, None]
    judged = judged._replace(row=judged.row + at)
    found.append(judged.where((visited > 0) & written[..., None]))
    count += sum(int(x.sum()) for x in result.rounds.acceptance_counts())
    at += batch_size
  return joined(found)


def _scores(
  target: Model, params, prompt: Array, tokens: Array, tried: Tried, sampling: Sampling
) -> tuple[Array, Judged]:
  """Which guesses were verified, [B, T, W], and `Judged` with fields [B, T, W].

  A token without a guess counts as a first child that does not exist. Entries past the end of a row
  are meaningless.
  """
  exists, visited, probability, drawn = _outcomes(target, params, prompt, tokens, tried, sampling)
  is_last = ~jnp.pad(exists[..., 1:], ((0, 0), (0, 0), (0, 1)))
  of_next = _token_scores(drawn, tokens)
  row, slot, sibling = jnp.indices(exists.shape)
  start = tried.start - target.prompt_tokens(prompt)[1][:, None]
  return visited, Judged(
    *(row, slot, jnp.broadcast_to(start[..., None], exists.shape), sibling),
    *(tried.position, tried.accepted, probability),
    guess=_token_scores(tried.q, tried.tokens),
    next=jax.tree.map(lambda x: jnp.where(is_last, x[..., None], 0.0), of_next),
  )


@functools.partial(jax.jit, static_argnames=("target", "sampling"))
def _outcomes(
  target: Model, params, prompt: Array, tokens: Array, tried: Tried, sampling: Sampling
) -> tuple[Array, Array, Array, Array]:
  """Outcomes of the guesses [B, T, W] made at each token.

  Returns:
    Which exist, which were verified, and the probability that each is accepted, all [B, T, W]; and
    the weights [B, T, V] by which each of tokens [B, T] was sampled, 0 if it was a guess.
  """
  p = distribution(teacher_forced_logits(target, params, prompt, tokens), sampling)
  probability, left = token_by_token(p, tried.q, tried.tokens)
  drawn = jnp.where(tried.accepted.any(axis=-1, keepdims=True), 0.0, left)
  exists, rank = tried.position >= 0, jnp.arange(tried.position.shape[-1])
  earlier_accepted = jnp.cumsum(tried.accepted, axis=-1) > tried.accepted
  return exists, (exists | (rank == 0)) & ~earlier_accepted, probability, drawn


@jax.jit
def _token_scores(weights: Array, token: Array) -> Scores:
  """Scores [...] of tokens [...] sampled in proportion to weights [..., V]; 0 where those are 0.

  Equally probable tokens share a rank, which makes its variance smaller than `spread`. This is a
  program by itself, and compares the weights as they are given: what a program computes it may
  compute twice, rounded in two ways, and then a token is not as probable as itself.
  """
  total = weights.sum(axis=-1, keepdims=True)
  law = jnp.where(total > 0, weights / total, 0.0)
  whole = law.sum(axis=-1)
  of_token = lambda x: jnp.take_along_axis(x, token[..., None], axis=-1)
  own, before = of_token(law), jnp.arange(law.shape[-1]) < token[..., None]
  weight = of_token(weights)
  ranked = jnp.where(weights > weight, 1.0, jnp.where(weights == weight, 0.5, 0.0))
  placed = jnp.where(before, law, 0.0).sum(axis=-1) + own[..., 0] / 2
  logs = jnp.log(jnp.maximum(law, FLOOR))
  mean = (law * logs).sum(axis=-1, keepdims=True)
  return Scores(
    rank=(law * ranked).sum(axis=-1) - whole / 2,
    place=placed - whole / 2,
    spread=jnp.maximum(whole - (law**3).sum(axis=-1), 0.0) / 12,
    log=jnp.where(whole > 0, (of_token(logs) - mean)[..., 0], 0.0),
    log_variance=(law * (logs - mean) ** 2).sum(axis=-1),
  )
