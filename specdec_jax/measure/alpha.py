"""Alpha as the paper measures it: E[sum min(p, q)] over text that the target generates.

Axis letters are those of `core.types`, except that T counts the tokens of an output.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather, gather_or_zero
from specdec_jax.core.context import Context, Prompt, prompt_ids
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import AnyPair, DecodeResult, Draft, Model, Params
from specdec_jax.core.verify.lossy import emitted_distribution
from specdec_jax.core.verify.tokens import draft_token_probs, within_lenience
from specdec_jax.measure.records import Outputs


class Estimate(NamedTuple):
  """Mean with its 95% confidence interval.

  The bootstrap is over whole texts, because the tokens of a text are dependent.
  """

  mean: float
  low: float
  high: float


@functools.partial(jax.jit, static_argnames=("model",))
def teacher_forced_logits(
  model: Model, params: Any, prompt: Prompt, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
  """Return the logits that predict each token of a given output, from one forward pass."""
  return teacher_forced(model, params, prompt, tokens)[0]


def teacher_forced(
  model: Model, params: Any, prompt: Prompt, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T V"], Float[Array, "B T E"], Int[Array, "B T"], Any]:
  """Run a forward pass over a given output.

  Returns:
    For each token, the logits and the hidden state that predict it, and the input before it; and
    the cache, which holds the prompt and all inputs. Its `length` does not count the inputs.
  """
  first, length = model.prompt_tokens(prompt)
  last = gather(first, length[:, None] - 1)
  inputs = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  _, cache = model.prefill(params, prompt, first.shape[1] + tokens.shape[1])
  logits, hidden, cache = model.extend(params, cache, inputs)
  return logits, hidden, inputs, cache


def draft_probs(
  pair: AnyPair, draft: Draft, prompt: Prompt, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
  """Return the q of a draft with gamma 1 for each token of an output, given those before it."""
  return proposals(pair.target.model, draft, pair.params, prompt, tokens)[1][:, :, 0]


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def proposals(
  target: Model,
  draft: Draft,
  params: Params,
  prompt: Prompt,
  tokens: Int[Array, "B T"],
) -> tuple[Int[Array, "B T N"], Float[Array, "B T N V"]]:
  """Return the draft tokens for each token of a given output, and their q.

  The draft proposes as in a round that begins at the token. This works for any draft, except those
  whose proposals depend on the outcomes of earlier rounds (`Draft.depends_on_outcomes`).
  """
  first, prompt_length = target.prompt_tokens(prompt)
  batch, num_tokens = tokens.shape
  num_slots = first.shape[1] + num_tokens + 2  # as in decoding
  # Rows may begin at different lengths; the output of each row follows its prompt tokens.
  slots = jnp.arange(num_slots)
  output = gather(tokens, jnp.clip(slots - prompt_length[:, None], 0, num_tokens - 1))
  padded = jnp.pad(first, ((0, 0), (0, num_slots - first.shape[1])))
  text = jnp.where(slots < prompt_length[:, None], padded, output)
  hidden, cache = target.prefill(params.target, prompt, num_slots)
  last = gather(padded, prompt_length[:, None] - 1)
  block = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  # The compiler drops this forward pass if the draft uses neither hidden states nor the cache.
  _, states, cache = target.extend(params.target, cache, block)
  states = jnp.concatenate([gather_or_zero(hidden, prompt_length - 2)[:, None], states], axis=1)

  def context(count) -> Context:
    length = prompt_length + count
    cached = target.commit(cache, length - 1)
    return Context(prompt_ids(prompt), text, length, cached, states[:, count])

  rng = jax.random.split(jax.random.key(0), batch)  # any key will do

  def propose(state, count):
    proposal, state = draft.propose(params.draft, state, context(count), rng)
    one_hot = jax.nn.one_hot(proposal.tokens, target.vocab_size)
    return state, (proposal.tokens, one_hot if proposal.q is None else proposal.q)

  start = context(0)._replace(prompt=prompt)
  state = draft.init(params.draft, start, hidden)
  draft_tokens, q = lax.scan(propose, state, jnp.arange(num_tokens))[1]
  return draft_tokens.swapaxes(0, 1), q.swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames=("sampling", "lenience"))
def acceptance_and_change(
  target_logits: Float[Array, "*batch V"],
  q: Float[Array, "*batch V"],
  sampling: Sampling,
  lenience: float = 1.0,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
  """Compute beta (Theorem 5; Appendix A.5), and how much lenience changes the output.

  Returns:
    beta = sum_x min(p(x) / l, q(x)), and the total variation distance between p and the
    distribution of the emitted token. At temperature 0 with l < 1, a draft token is accepted by the
    criterion of `within_lenience` instead.
  """
  p = distribution(target_logits, sampling)
  if sampling.temperature == 0 and lenience < 1:
    draft_token = q.argmax(axis=-1)
    lenient = within_lenience(target_logits, draft_token, lenience)[..., None]
    emitted = jnp.where(lenient, jax.nn.one_hot(draft_token, p.shape[-1]), p)
    return (emitted * q).sum(axis=-1), jnp.abs(emitted - p).sum(axis=-1) / 2
  change = jnp.abs(emitted_distribution(p, q, lenience) - p).sum(axis=-1) / 2
  return jnp.minimum(p / lenience, q).sum(axis=-1), change


@functools.partial(jax.jit, static_argnames=("sampling",))
def rejection_sampling_rate(
  target_logits: Float[Array, "*batch V"], q: Float[Array, "*batch V"], sampling: Sampling
) -> Float[Array, "*batch"]:
  """Return the acceptance probability of rejection sampling, min_x q / p (Appendix A.2)."""
  p = distribution(target_logits, sampling)
  return jnp.where(p > 0, q / jnp.where(p > 0, p, 1.0), jnp.inf).min(axis=-1)


def positional_acceptance(
  pair: AnyPair,
  prompts: Sequence[Array],
  decoded: Sequence[DecodeResult],
  sampling: Sampling,
  width: int = 8,
  lenience: float = 1.0,
  greedy_siblings: bool = False,
) -> Float[np.ndarray, " W"]:
  """Measure positional acceptance: the probability that the child of each rank is accepted.

  At each token that the target generated, the draft proposes `width` children. The probability that
  token verification accepts each of them (and rejects the earlier ones) is computed, not sampled.
  """
  tree = dataclasses.replace(branching(width), greedy_siblings=greedy_siblings)
  total, count = np.zeros(width), 0
  draft = pair.draft.build(sampling, tree)
  for prompt, output in zip(prompts, decoded):
    logits = teacher_forced_logits(pair.target.model, pair.target.params, prompt, output.tokens)
    draft_tokens, q = proposals(pair.target.model, draft, pair.params, prompt, output.tokens)
    accepted = np.asarray(_sibling_probs(logits, draft_tokens, q, sampling, tree, lenience))
    is_text = np.arange(accepted.shape[1]) < np.asarray(output.lengths)[:, None]
    total += accepted[is_text].sum(axis=0)
    count += int(is_text.sum())
  return total / count


@functools.partial(jax.jit, static_argnames=("sampling", "tree", "lenience"))
def _sibling_probs(
  logits: Float[Array, "B T V"],
  draft_tokens: Int[Array, "B T W"],
  q: Float[Array, "B T W V"],
  sampling: Sampling,
  tree: Tree,
  lenience: float,
) -> Float[Array, "B T W"]:
  """Return the probability that each sibling is the accepted one."""
  nodes = (tree.num_nodes, logits.shape[-1])
  p = jnp.broadcast_to(distribution(logits, sampling)[:, :, None], (*logits.shape[:2], *nodes))

  def flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])

  q_x, r_x = draft_token_probs(tree, flat(draft_tokens), flat(q), flat(p), lenience)
  q_x = lenience * q_x
  accepted = jnp.where(q_x > r_x, r_x / q_x, 1.0).reshape(draft_tokens.shape)
  if sampling.temperature == 0 and lenience < 1:
    accepted = jnp.where(within_lenience(logits[:, :, None], draft_tokens, lenience), 1.0, accepted)
  rejected = jnp.cumprod(1 - accepted, axis=-1)  # this sibling and all earlier ones
  return accepted * jnp.pad(rejected[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1.0)


def mean_with_interval(rows: list[np.ndarray], seed: int = 0, resamples: int = 2000) -> Estimate:
  """Return the mean of the values of all rows, with a confidence interval by resampling rows."""
  sums, counts = (np.array([f(row) for row in rows]) for f in (np.sum, len))
  return ratio_with_interval(sums, counts, seed, resamples)


def ratio_with_interval(
  sums: Float[np.ndarray, " texts"],
  counts: Int[np.ndarray, " texts"],
  seed: int = 0,
  resamples: int = 2000,
) -> Estimate:
  """Return the total sum / the total count, with a confidence interval by resampling texts."""
  picks = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
  means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
  low, high = np.quantile(means, [0.025, 0.975])
  return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def measure_alpha(
  pair: AnyPair,
  prompts: Sequence[Array],
  decoded: Sequence[DecodeResult],
  sampling: Sampling,
  lenience: float = 1.0,
) -> Outputs:
  """Measure alpha of a pair's draft over text that its target generated.

  `decoded` are outputs of autoregressive decoding for each batch of prompts. Only the fields that
  this text determines are set.
  """
  betas, changes, rejections = [], [], []
  draft = pair.draft.build(sampling, chain(1))
  for prompt, output in zip(prompts, decoded):
    longest = -(-int(np.max(output.lengths)) // 16) * 16  # few shapes, so few programs
    tokens = output.tokens[:, :longest]
    logits = teacher_forced_logits(pair.target.model, pair.target.params, prompt, tokens)
    q = draft_probs(pair, draft, prompt, tokens)
    beta, change = map(np.asarray, acceptance_and_change(logits, q, sampling, lenience))
    rejection = np.asarray(rejection_sampling_rate(logits, q, sampling))
    lengths = np.asarray(output.lengths)
    betas += [row[:n] for row, n in zip(beta, lengths)]
    changes += [row[:n] for row, n in zip(change, lengths)]
    rejections += [row[:n] for row, n in zip(rejection, lengths)]
  alpha = mean_with_interval(betas)
  return Outputs(
    num_tokens=sum(map(len, betas)),
    alpha=alpha.mean,
    alpha_low=alpha.low,
    alpha_high=alpha.high,
    beta_lag1=lag1_correlation(betas),
    total_variation=float(np.concatenate(changes).mean()),
    rejection_sampling_rate=float(np.concatenate(rejections).mean()),
  )


def lag1_correlation(rows: list[np.ndarray]) -> float:
  """Return the lag-1 autocorrelation within rows, around the overall mean; NaN without variance."""
  mean = np.concatenate(rows).mean()
  before = np.concatenate([row[:-1] for row in rows]) - mean
  after = np.concatenate([row[1:] for row in rows]) - mean
  scale = np.sqrt((before**2).sum() * (after**2).sum())
  return float((before * after).sum() / scale) if scale > 0 else math.nan
