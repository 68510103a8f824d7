"""The exact laws of what happens in rounds: of each guess, its acceptance and the token after it.

q is what the draft reports of its guesses; p comes from a parallel pass of the target over the text
that was decoded, never from the loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.decoding import all_rounds, decoded, one_round, require_finite, start
from specdec_jax.exactness.drift import Judged, joined
from specdec_jax.measurement.alpha import teacher_forced_logits
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Context, Decoded, Draft, Model, Outcome, Proposal, Rounds, Rule
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling, distribution, row_keys
from specdec_jax.trees import Tree, chain

Law = Callable[[Array, Array, Array], tuple[Array, Array]]
Decode = Callable[..., tuple[Decoded, Array]]  # (prompt [B, P], keys [B], max_new_tokens=)


def algorithm_1(p: Array, q: Array, guess: Array) -> tuple[Array, Array]:
  """Probability [...] that `guess` [...] is accepted, and weights [..., V] of the token if not.

  Where there is no guess q is 0, and p is left. Not `rules.tokens.residual`, which is checked.
  """
  p_x, q_x = (jnp.take_along_axis(x, guess[..., None], axis=-1)[..., 0] for x in (p, q))
  return jnp.where(p_x < q_x, p_x / q_x, 1.0), jnp.maximum(p - q, 0.0)


def recorded(
  pair: Pair, sampling: Sampling, gamma: int, rule: Callable[[Sampling], Rule] = TokenRule
) -> Decode:
  """As `pair.decoder`, with the q [B, T, V] of the guess judged at each token, 0 at a bonus token.

  The rounds are the loop's own, of a draft that keeps what it reports.
  """
  draft = pair.draft(sampling, chain(gamma))
  models = pair.target, RecordingDraft(draft, pair.target.vocab_size)
  common: dict[str, Any] = dict(rule=rule(sampling), eos_id=pair.vocabulary.eos_id)
  params = pair.target_params, pair.draft_params
  return functools.partial(_recorded_decode, *models, *params, **common)


@dataclasses.dataclass(frozen=True)
class RecordingDraft(Draft):
  """The same draft, a chain, whose state holds the q of every slot too.

  A slot past the text is written again by the next round, as a cache is; a bonus token's never was.

  Attributes:
    draft: as it is. vocab_size: V.
  """

  draft: Draft
  vocab_size: int
  tree: Tree = dataclasses.field(init=False)

  def __post_init__(self):
    object.__setattr__(self, "tree", self.draft.tree)

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    own = self.draft.start(params, context, hidden)
    return own, jnp.zeros((*context.tokens.shape, self.vocab_size))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    own, all_q = state
    proposal, own = self.draft.propose(params, own, context, rng)
    q = jax.nn.one_hot(proposal.tokens, self.vocab_size) if proposal.q is None else proposal.q
    write = lambda row, new, at: lax.dynamic_update_slice(row, new, (at, 0))
    return proposal, (own, jax.vmap(write)(all_q, q.astype(all_q.dtype), context.length))

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    own, all_q = state
    return self.draft.observe(params, own, outcome), all_q


@functools.partial(jax.jit, static_argnames=("target", "draft", "max_new_tokens", "rule", "eos_id"))
def _recorded_decode(
  target: Model,
  draft: Draft,
  target_params,
  draft_params,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  rule: Rule,
  eos_id: int,
) -> tuple[Decoded, Array]:
  models = target, draft, target_params, draft_params
  step = functools.partial(one_round, *models, rule, rng, eos_id)
  s = all_rounds(step, start(*models, prompt, max_new_tokens))
  slots = s.prompt_length[:, None] + jnp.arange(max_new_tokens)
  return decoded(s), jnp.take_along_axis(s.draft[1], slots[..., None], axis=1)


def judge_rounds(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  num_guesses: int,
  max_new_tokens: int,
  seed: int,
  law: Law = algorithm_1,
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
    law: what a guess's probability is, and what is left if it is refused.
    batch_size: rows decoded together; q alone takes 4 V bytes for each of their tokens.
  """
  prompts, found, count, at = pair.prompt(texts), [], 0, 0
  while count < num_guesses:
    prompt = prompts[np.arange(at, at + batch_size) % len(texts)]
    result, q = decode(prompt, row_keys(seed, at, batch_size), max_new_tokens=max_new_tokens)
    longest = -(-int(require_finite(result).lengths.max()) // 32) * 32  # few widths, few programs
    tokens, models = result.tokens[:, :longest], (pair.target, pair.target_params)
    scores = _scores(*models, prompt, tokens, q[:, :longest], result.rounds, sampling, law)
    written = np.arange(tokens.shape[1]) < np.asarray(result.lengths)[:, None]
    found.append(Judged(*(np.asarray(x, float)[written] for x in scores)))
    count += sum(int(x.sum()) for x in result.rounds.judged())
    at += batch_size
  return joined(found)


@functools.partial(jax.jit, static_argnames=("target", "sampling", "law"))
def _scores(
  target: Model,
  params,
  prompt: Array,
  tokens: Array,
  q: Array,
  rounds: Rounds,
  sampling: Sampling,
  law: Law,
) -> tuple[Array, ...]:
  """The fields of `Judged`, [B, T] each; what lies past a row's end means nothing."""
  ends = jnp.cumsum(rounds.num_emitted, axis=0).T  # [B, R]
  t = jnp.arange(tokens.shape[1])
  number = (ends[:, None] <= t[:, None]).sum(axis=-1)  # of the round that emitted a token, [B, T]
  of_round = lambda x: jnp.take_along_axis(x.T, number, axis=1, mode="clip")
  position = t - of_round(ends.T - rounds.num_emitted)
  gamma = rounds.guesses.shape[-1]
  guesses = rounds.guesses.swapaxes(0, 1).reshape(len(tokens), -1)  # [B, R G]
  at = number * gamma + jnp.clip(position, 0, gamma - 1)
  guess = jnp.take_along_axis(guesses, at, axis=1, mode="clip")
  accepted = position < of_round(rounds.num_accepted)
  p = distribution(teacher_forced_logits(target, params, prompt, tokens), sampling)
  probability, left = law(p, q, guess)
  drawn = jnp.where(accepted[..., None], 0.0, jnp.where(left.any(-1, keepdims=True), left, p))
  return position, accepted, probability, *_rank(q, guess), *_rank(drawn, tokens)


def _rank(weights: Array, token: Array) -> tuple[Array, Array]:
  """Mass [...] of what is likelier than `token` [...] plus half of its own, less 1/2: mean 0.

  Equally likely tokens share a rank, which makes the variance, given beside it, smaller than it is
  said to be. Both are 0 where weights [..., V] are.
  """
  total = weights.sum(axis=-1, keepdims=True)
  law = jnp.where(total > 0, weights / total, 0.0)
  own = jnp.take_along_axis(law, token[..., None], axis=-1)
  half_ranks = jnp.where(law > own, 1.0, jnp.where(law == own, 0.5, 0.0))
  whole = law.sum(axis=-1)
  variance = jnp.maximum(whole - (law**3).sum(axis=-1), 0.0) / 12
  return (law * half_ranks).sum(axis=-1) - whole / 2, variance
