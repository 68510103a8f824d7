"""Test statistics of rounds: scores of draft tokens, acceptance and next tokens, which have mean 0.

q is the distribution that the draft reports, and p is the distribution of the target. p comes from
one target forward pass over the decoded text, not from the decoding loop, which is under test.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import gather_token
from specdec_jax.core.context import Context, Prompt
from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, require_static
from specdec_jax.core.types import (
  DecodeResult,
  DraftOptions,
  Model,
  Outcome,
  Params,
  Proposal,
  WrappedDraft,
)
from specdec_jax.exactness.martingale import MIN_PROB, RoundScores, Scores, joined
from specdec_jax.exactness.paths import batches
from specdec_jax.exactness.processed import target_probs
from specdec_jax.pair import Pair

# Function of (prompt [B, P], keys [B], *, max_new_tokens).
Decode = Callable[..., tuple[DecodeResult, "TriedDraftTokens"]]


class TriedDraftTokens(NamedTuple):
  """Draft tokens for each token of a text: the children of the node before it, in order of rank.

  Attributes:
    start: slot of `Context.tokens` at which the round began.
    position: position in the round (`positions`); -1 for a child that the node does not have or
      that the draft did not propose.
    q: distributions that the draft reports; 0 for a child that the node does not have.
  """

  start: Int[Array, "B T"]
  position: Int[Array, "B T W"]
  tokens: Int[Array, "B T W"]
  q: Float[Array, "B T W V"]
  accepted: Bool[Array, "B T W"]


def positions(tree: Tree) -> list[int]:
  """Return the position in a round of each draft token of a tree.

  It is an index into the sorted list of all distinct pairs (depth, rank) in the tree; in a chain,
  it is the index of the draft token.
  """
  places = [*zip(tree.depths[1:].tolist(), tree.ranks.tolist())]
  return [sorted({*places}).index(place) for place in places]


def acceptance_probs(
  p: Float[Array, "*batch V"], q: Float[Array, "*batch W V"], draft_tokens: Int[Array, "*batch W"]
) -> tuple[Float[Array, "*batch W"], Float[Array, "*batch V"]]:
  """Compute the exact acceptance probabilities of the draft tokens at a node, and the residual.

  The residual r begins as p. A draft token x from q is accepted with probability min(1, r(x) /
  q(x)). If it is rejected, r becomes norm(max(0, r - q)). Where there is no draft token, q is 0 and
  r does not change. With one draft token, this is Algorithm 1 (Section 2.3). The computation does
  not use `core.verify.tokens`, because that module is under test.

  Returns:
    The probability that each draft token is accepted, given that its earlier siblings were
    rejected, and the weights of the next token if all draft tokens are rejected.
  """
  r, probabilities = p, []
  for rank in range(draft_tokens.shape[-1]):
    if rank:
      r = r / r.sum(axis=-1, keepdims=True)
    q_of_rank = q[..., rank, :]
    r_x, q_x = (gather_token(x, draft_tokens[..., rank]) for x in (r, q_of_rank))
    probabilities.append(jnp.where(r_x < q_x, r_x / q_x, 1.0))
    residual = jnp.maximum(r - q_of_rank, 0.0)
    r = jnp.where(residual.any(axis=-1, keepdims=True), residual, r)
  return jnp.stack(probabilities, axis=-1), r


def recorded(
  pair: Pair,
  sampling: Sampling,
  tree: Tree,
  eos_id: int | None = None,
  processors: Processors = (),
) -> Decode:
  """Return a function that decodes as `pair.decoder` does, and also returns `TriedDraftTokens`.

  `eos_id` defaults to the EOS of the pair's vocabulary.
  """
  draft = pair.draft.build(sampling, tree, DraftOptions(processors))
  draft = RecordingDraft(draft, pair.target.model.vocab_size)
  eos_id = pair.vocabulary.eos_id if eos_id is None else eos_id
  decoder = Decoder(pair.target.model, draft, pair.verifier_for(sampling), eos_id, processors)
  return functools.partial(_recorded_decode, decoder, pair.params)


@dataclasses.dataclass(frozen=True)
class RecordingDraft(WrappedDraft):
  """Wrapper of a draft that records in its state the draft tokens at every slot.

  As in a cache, the next round overwrites the slots past the text.
  """

  vocab_size: int

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    state = self.draft.init(params, context, hidden)
    tree = require_static("recording", self.tree)
    slots = *context.tokens.shape, tree.width
    none, q = jnp.zeros(slots, jnp.int32), jnp.zeros((*slots, self.vocab_size))
    return state, TriedDraftTokens(none[..., 0], none, none, q, jnp.zeros(slots, bool))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    draft_state, tried = state
    proposal, draft_state = self.draft.propose(params, draft_state, context, rng)
    return proposal, (draft_state, tried)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    draft_state, tried = state
    tree = require_static("recording", self.tree)
    (tokens, q, _), path = outcome.proposal, outcome.verification.path
    if q is None:
      q = jax.nn.one_hot(tokens, self.vocab_size)
    if path is None:
      i = jnp.arange(tree.depth)
      path = jnp.where(i < outcome.verification.num_accepted[:, None], i + 1, 0)
    rows = jnp.arange(len(tokens))[:, None, None]
    # Children [B, D + 1, W] of the last committed token and of the accepted nodes; N for no child.
    children = jnp.asarray(tree.children)[jnp.pad(path, ((0, 0), (1, 0)))]
    begin = outcome.length - outcome.num_emitted
    draft_tokens = tokens.at[rows, children].get(mode="clip")
    position = jnp.asarray([*positions(tree), -1], jnp.int32)[children]
    tried_in_round = TriedDraftTokens(
      jnp.broadcast_to(begin[:, None], children.shape[:2]),
      jnp.where(draft_tokens < 0, -1, position),  # not proposed
      draft_tokens,
      q.at[rows, children].get(mode="fill", fill_value=0.0),
      children + 1 == jnp.pad(path, ((0, 0), (0, 1)))[..., None],
    )

    def write(slots: Array, values: Array) -> Array:
      write_row = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
      return jax.vmap(write_row)(slots, values.astype(slots.dtype), begin)

    draft_state = self.draft.observe(params, draft_state, outcome)
    return draft_state, jax.tree.map(write, tried, tried_in_round)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def _recorded_decode(
  decoder: Decoder, params: Params, prompt: Prompt, rng: Array, *, max_new_tokens: int
) -> tuple[DecodeResult, TriedDraftTokens]:
  state = decoder.init(params, prompt, rng, max_new_tokens)
  state = decoder.run_rounds(params, state)
  rows = jnp.arange(len(prompt))[:, None]
  slots = state.prompt_length[:, None] + jnp.arange(max_new_tokens)
  return decoder.result(state), jax.tree.map(lambda x: x[rows, slots], state.draft_state[1])


def score_rounds(
  pair: Pair,
  texts: Sequence[str],
  decode: Decode,
  settings: DecodeSettings,
  num_draft_tokens: int,
  processors: Processors = (),
) -> RoundScores:
  """Decode texts until `num_draft_tokens` of them are verified; return the scores of rounds.

  Texts are decoded repeatedly if necessary. The decision to stop depends on earlier rounds only, so
  the means of the scores stay 0. The recorded q take 4 V W bytes for each token of a batch.
  `decode` comes from `recorded`, with the same `processors`, which also apply to p.
  """
  parts, count = [], 0
  for first, prompt, keys in batches(pair, texts, settings):
    result, tried = decode(prompt, keys, max_new_tokens=settings.max_new_tokens)
    longest = -(-int(require_finite(result).lengths.max()) // 32) * 32  # few shapes, few programs
    tokens, tried = result.tokens[:, :longest], TriedDraftTokens(*(x[:, :longest] for x in tried))
    scores = _scores(pair, prompt, tokens, tried, settings, processors)
    visited, scored = jax.tree.map(lambda x: np.asarray(x, float), scores)
    is_text = np.arange(tokens.shape[1]) < np.asarray(result.lengths)[:, None]
    scored = scored._replace(row=scored.row + first)
    parts.append(scored.where((visited > 0) & is_text[..., None]))
    count += sum(int(x.sum()) for x in result.rounds.acceptance_counts())
    if count >= num_draft_tokens:
      break
  return joined(parts)


def _scores(
  pair: Pair,
  prompt: Prompt,
  tokens: Array,
  tried: TriedDraftTokens,
  settings: DecodeSettings,
  processors: Processors,
) -> tuple[Array, RoundScores]:
  """Return which draft tokens were verified, and their scores, all with shape [B, T, W].

  A bonus token has the scores of a first child that does not exist. Entries past the end of a row
  are arbitrary.
  """
  target, limit = pair.target.model, settings.max_new_tokens
  exists, visited, probability, drawn = _outcomes(
    target, pair.target.params, prompt, tokens, tried, settings.sampling, limit, processors
  )
  is_last = ~jnp.pad(exists[..., 1:], ((0, 0), (0, 0), (0, 1)))
  next_scores = token_scores(drawn, tokens)
  row, slot, sibling = jnp.indices(exists.shape)
  start = tried.start - target.prompt_tokens(prompt)[1][:, None]
  return visited, RoundScores(
    row=row,
    slot=slot,
    start=jnp.broadcast_to(start[..., None], exists.shape),
    sibling=sibling,
    position=tried.position,
    accepted=tried.accepted,
    probability=probability,
    draft_token=token_scores(tried.q, tried.tokens),
    next=jax.tree.map(lambda x: jnp.where(is_last, x[..., None], 0.0), next_scores),
  )


@functools.partial(jax.jit, static_argnames=("target", "sampling"))
def _outcomes(
  target: Model,
  params: Any,
  prompt: Prompt,
  tokens: Array,
  tried: TriedDraftTokens,
  sampling: Sampling,
  limit: int,
  processors: Processors,
) -> tuple[Array, Array, Array, Array]:
  """Return (exists, verified, probability) [B, T, W] and the weights of the next token [B, T, V].

  A first child counts as verified even if it does not exist. The weights are 0 for an accepted
  draft token.
  """
  p = target_probs(target, params, prompt, tokens, sampling, limit, processors)
  probability, residual = acceptance_probs(p, tried.q, tried.tokens)
  drawn = jnp.where(tried.accepted.any(axis=-1, keepdims=True), 0.0, residual)
  exists, rank = tried.position >= 0, jnp.arange(tried.position.shape[-1])
  earlier_accepted = jnp.cumsum(tried.accepted, axis=-1) > tried.accepted
  return exists, (exists | (rank == 0)) & ~earlier_accepted, probability, drawn


@jax.jit
def token_scores(weights: Array, token: Array) -> Scores:
  """Return the scores of tokens [...] that were sampled in proportion to weights [..., V].

  Scores are 0 where all weights are 0. This function is jitted separately, because a program that
  also computed the weights could compute them twice, with different rounding. The weight of a token
  would then not equal itself.
  """
  total = weights.sum(axis=-1, keepdims=True)
  probs = jnp.where(total > 0, weights / total, 0.0)
  mass = probs.sum(axis=-1)  # 1, or 0 where all weights are 0
  is_earlier = jnp.arange(probs.shape[-1]) < token[..., None]
  weight = gather_token(weights, token)[..., None]
  ranked = jnp.where(weights > weight, 1.0, jnp.where(weights == weight, 0.5, 0.0))
  placed = jnp.where(is_earlier, probs, 0.0).sum(axis=-1) + gather_token(probs, token) / 2
  logs = jnp.log(jnp.maximum(probs, MIN_PROB))
  mean = (probs * logs).sum(axis=-1, keepdims=True)
  return Scores(
    rank=(probs * ranked).sum(axis=-1) - mass / 2,
    place=placed - mass / 2,
    spread=jnp.maximum(mass - (probs**3).sum(axis=-1), 0.0) / 12,
    log=jnp.where(mass > 0, gather_token(logs, token) - mean[..., 0], 0.0),
    log_variance=(probs * (logs - mean) ** 2).sum(axis=-1),
  )
