"""Alpha as the paper measures it: E[sum min(p, q)] over text that the target generates."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.core.arrays import gather_or_zero
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import Context, Draft, Model
from specdec_jax.core.verify.tokens import emitted_distribution, guess_probs, within_lenience


class Estimate(NamedTuple):
  """A mean with its 95% interval (bootstrap over sequences, whose tokens are not independent)."""

  mean: float
  low: float
  high: float


class Acceptance(NamedTuple):
  """What the paper's alpha is made of, over text that the target generated.

  Attributes:
    alpha: mean of beta over all tokens (Corollary 6).
    lag1: correlation of beta with the beta of the token before; 0 if acceptance were independent,
      as Section 3.1 assumes. NaN where beta does not vary.
    change: mean total variation distance from the target's distribution of a token that was guessed
      and judged; 0 without lenience.
    num_tokens: tokens scored.
  """

  alpha: Estimate
  lag1: float
  change: float
  num_tokens: int


@functools.partial(jax.jit, static_argnames=("model",))
def teacher_forced_logits(model: Model, params, prompt: Array, tokens: Array) -> Array:
  """Logits [B, T, V] before each of tokens [B, T], in one parallel pass."""
  first, length = model.prompt_tokens(prompt)
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  _, cache = model.prefill(params, prompt, first.shape[1] + tokens.shape[1])
  return model.extend(params, cache, jnp.concatenate([newest, tokens[:, :-1]], axis=1))[0]


def draft_probs(pair, draft: Draft, prompt: Array, tokens: Array) -> Array:
  """q [B, T, V], from which a draft of gamma 1 guesses each of tokens [B, T] given those before."""
  return _proposals(pair, draft, prompt, tokens)[1][:, :, 0]


def _proposals(pair, draft: Draft, prompt: Array, tokens: Array) -> tuple[Array, Array]:
  params = pair.target_params, pair.draft_params
  return proposals(pair.target, draft, *params, prompt, tokens)


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def proposals(
  target: Model, draft: Draft, target_params, draft_params, prompt: Array, tokens: Array
) -> tuple[Array, Array]:
  """What a draft guesses in place of each of tokens [B, T], given those before: guesses [B, T, N],
  and the q [B, T, N, V] of each.

  The draft proposes as it does in a round, so this holds for any draft.
  """
  first, begins = target.prompt_tokens(prompt)
  batch, num_tokens = tokens.shape
  num_slots = first.shape[1] + num_tokens + 2  # as in decoding
  # Rows may begin at different lengths, each with its tokens behind it.
  slots = jnp.arange(num_slots)
  generated = jnp.take_along_axis(tokens, slots - begins[:, None], axis=1, mode="clip")
  begun = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
  text = jnp.where(slots < begins[:, None], begun, generated)
  hidden, cache = target.prefill(target_params, prompt, num_slots)
  before = jnp.take_along_axis(begun, begins[:, None] - 1, axis=1)
  block = jnp.concatenate([before, tokens[:, :-1]], axis=1)
  # Both are left out where no draft looks at them.
  _, states, cache = target.extend(target_params, cache, block)
  states = jnp.concatenate([gather_or_zero(hidden, begins - 2)[:, None], states], axis=1)

  def context(count) -> Context:
    length = begins + count
    return Context(prompt, text, length, target.commit(cache, length - 1), states[:, count])

  rng = jax.random.split(jax.random.key(0), batch)  # what is drawn does not matter

  def propose(state, count):
    proposal, state = draft.propose(draft_params, state, context(count), rng)
    chosen = jax.nn.one_hot(proposal.tokens, target.vocab_size)
    return state, (proposal.tokens, chosen if proposal.q is None else proposal.q)

  state = draft.init(draft_params, context(0), jnp.zeros((batch, 1, 0)))
  guesses, q = lax.scan(propose, state, jnp.arange(num_tokens))[1]
  return guesses.swapaxes(0, 1), q.swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames=("sampling", "lenience"))
def acceptance_and_change(
  target_logits: Array, q: Array, sampling: Sampling, lenience: float = 1.0
) -> tuple[Array, Array]:
  """beta, the chance that a guess is accepted (Theorem 5; Appendix A.5), and what lenience does.

  Args:
    target_logits: [..., V].
    q: what the draft guesses from, [..., V].
    sampling: how the target's logits are adjusted.
    lenience: l.

  Returns:
    sum_x min(p / l, q) and the total variation distance of what is emitted from p, each [...].
  """
  p = distribution(target_logits, sampling)
  if sampling.temperature == 0 and lenience < 1:
    guess = q.argmax(axis=-1)
    near = within_lenience(target_logits, guess, lenience)[..., None]
    own, p = p, jnp.where(near, jax.nn.one_hot(guess, p.shape[-1]), p)
    return (p * q).sum(axis=-1), jnp.abs(p - own).sum(axis=-1) / 2
  change = jnp.abs(emitted_distribution(p, q, lenience) - p).sum(axis=-1) / 2
  return jnp.minimum(p / lenience, q).sum(axis=-1), change


def positional_acceptance(
  pair, prompts, decoded, sampling: Sampling, width: int = 8, lenience: float = 1.0
) -> np.ndarray:
  """How often a node's child of each rank [W] is the one that stands, as `tree_theory.best_tree` wants.

  Measured at the tokens that the target wrote: there `width` children are guessed, and judged by
  token verification, whose chances are worked out and not drawn. Arguments as in `measure_alpha`.
  """
  tree, total, count = branching(width), np.zeros(width), 0
  draft = pair.draft(sampling, tree)
  for prompt, output in zip(prompts, decoded):
    logits = teacher_forced_logits(pair.target, pair.target_params, prompt, output.tokens)
    guesses, q = _proposals(pair, draft, prompt, output.tokens)
    stands = np.asarray(_sibling_chances(logits, guesses, q, sampling, tree, lenience))
    is_text = np.arange(stands.shape[1]) < np.asarray(output.lengths)[:, None]
    total += stands[is_text].sum(axis=0)
    count += int(is_text.sum())
  return total / count


@functools.partial(jax.jit, static_argnames=("sampling", "tree", "lenience"))
def _sibling_chances(
  logits: Array, guesses: Array, q: Array, sampling: Sampling, tree: Tree, lenience: float
) -> Array:
  """Probability [B, T, W] that each of the guesses [B, T, W] is the one that stands."""
  nodes = (tree.num_nodes, logits.shape[-1])
  p = jnp.broadcast_to(distribution(logits, sampling)[:, :, None], (*logits.shape[:2], *nodes))
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  q_x, r_x = guess_probs(tree, flat(guesses), flat(q), flat(p), lenience)
  q_x = lenience * q_x
  stands = jnp.where(q_x > r_x, r_x / q_x, 1.0).reshape(guesses.shape)
  if sampling.temperature == 0 and lenience < 1:
    stands = jnp.where(within_lenience(logits[:, :, None], guesses, lenience), 1.0, stands)
  refused = jnp.cumprod(1 - stands, axis=-1)
  return stands * jnp.pad(refused[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1.0)


def mean_with_interval(rows: list[np.ndarray], seed: int = 0, resamples: int = 2000) -> Estimate:
  """Mean over all values of all rows; its interval by resampling whole rows."""
  sums, counts = (np.array([f(row) for row in rows]) for f in (np.sum, len))
  return ratio_with_interval(sums, counts, seed, resamples)


def ratio_with_interval(
  sums: np.ndarray, counts: np.ndarray, seed: int = 0, resamples: int = 2000
) -> Estimate:
  """Sum of sums [N] over sum of counts [N], of N texts; its interval by resampling these."""
  picks = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
  means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
  low, high = np.quantile(means, [0.025, 0.975])
  return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def measure_alpha(pair, prompts, decoded, sampling: Sampling, lenience: float = 1.0) -> Acceptance:
  """Acceptance of a pair's draft over what its target generated.

  Args:
    pair: see `pairs.Pair`.
    prompts: source tokens [B, P] of each batch.
    decoded: the target's own outputs for each of them.
    sampling: how both models sample.
    lenience: l.
  """
  betas, changes = [], []
  draft = pair.draft(sampling, chain(1))
  for prompt, output in zip(prompts, decoded):
    longest = -(-int(np.max(output.lengths)) // 16) * 16  # few widths, so few programs
    tokens = output.tokens[:, :longest]
    logits = teacher_forced_logits(pair.target, pair.target_params, prompt, tokens)
    q = draft_probs(pair, draft, prompt, tokens)
    beta, change = map(np.asarray, acceptance_and_change(logits, q, sampling, lenience))
    betas += [row[:n] for row, n in zip(beta, np.asarray(output.lengths))]
    changes += [row[:n] for row, n in zip(change, np.asarray(output.lengths))]
  return Acceptance(
    alpha=mean_with_interval(betas),
    lag1=lag1_correlation(betas),
    change=float(np.concatenate(changes).mean()),
    num_tokens=sum(map(len, betas)),
  )


def lag1_correlation(rows: list[np.ndarray]) -> float:
  """Of neighbours within rows, around the mean of all."""
  mean = np.concatenate(rows).mean()
  before = np.concatenate([row[:-1] for row in rows]) - mean
  after = np.concatenate([row[1:] for row in rows]) - mean
  scale = np.sqrt((before**2).sum() * (after**2).sum())
  return float((before * after).sum() / scale) if scale > 0 else math.nan
