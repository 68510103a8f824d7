"""What a round is made of, in seconds: a target step, a draft step, a verification.

Each is a chain inside one jitted program, every link fed by the one before, so that nothing
is skipped, overlapped or waited for by the host.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specdec_jax.protocols import Draft, Model
from specdec_jax.sampling import Sampling, distribution
from specdec_jax.speculative import speculative_sample


class Costs(NamedTuple):
  """Seconds on this device.

  Attributes:
    target_step: read one token, sample the next.
    draft_step: a round's proposal, divided by gamma (Definition 7 counts gamma runs of M_q).
    verify: read gamma + 1 tokens, judge, sample one.
    target_start: the target's encoder, once a text.
    draft_start: the draft's.
  """

  target_step: float
  draft_step: float
  verify: float
  target_start: float
  draft_start: float

  @property
  def c(self) -> float:
    """Cost coefficient (Definition 7)."""
    return self.draft_step / self.target_step

  @property
  def v(self) -> float:
    """Time of a verification over the time of a step; the paper takes it as 1."""
    return self.verify / self.target_step


def interleaved_medians(
  calls: Sequence[Callable[[], object]], repeats: int
) -> tuple[list[float], list[object]]:
  """Median seconds of each call over `repeats` rounds of all of them in turn, and last results.

  The first, uncounted round compiles and warms up.
  """
  results = [jax.block_until_ready(call()) for call in calls]
  seconds = np.zeros((repeats, len(calls)))
  for r in range(repeats):
    # Every other round runs backwards, so that no call always follows the same neighbour.
    for i in range(len(calls)) if r % 2 else reversed(range(len(calls))):
      since = time.perf_counter()
      results[i] = jax.block_until_ready(calls[i]())
      seconds[r, i] = time.perf_counter() - since
  return list(np.median(seconds, axis=0)), results


def measure_costs(
  target: Model,
  target_params,
  draft: Draft,
  draft_params,
  prompt: Array,
  sampling: Sampling,
  chain: int = 32,
  repeats: int = 9,
) -> Costs:
  """Time the parts of a round for prompt [B, P], each `chain` links long, interleaved."""
  batch, gamma = prompt.shape[0], draft.gamma
  first, length = target.begin(prompt)
  num_slots = first.shape[1] + chain + gamma + 1
  rng = jax.random.split(jax.random.key(0), batch)
  keys_at = lambda i: jax.vmap(lambda key: jax.random.fold_in(key, i))(rng)
  some_q = jnp.full((batch, gamma, target.vocab_size), 1 / target.vocab_size)

  def chained(params, state, link, width):
    """Seconds of one `link`: (params, state, tokens [B, width], i) -> (state, tokens)."""
    tokens = jnp.full((batch, width), 2, jnp.int32)
    run = lambda params, state: lax.fori_loop(
      0, chain, lambda i, carry: link(params, *carry, i), (state, tokens)
    )[1]
    compiled = jax.jit(run).lower(params, state).compile()
    return lambda: compiled(params, state)

  def step(params, cache, tokens, i):
    cache = cache.replace(length=length - 1 + i)
    logits, cache = target.extend(params, cache, tokens)
    no_guess = jnp.zeros((batch, 0), jnp.int32)
    p = distribution(logits, sampling)
    verdict = speculative_sample(keys_at(i), no_guess, some_q[:, :0], p)
    return cache, verdict.next_token[:, None]

  def propose(params, state, tokens, i):
    text = jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1])))
    guesses, q, state = draft.propose(params, state, text, length + i, keys_at(i))
    return state, guesses + (q.sum(axis=-1) < 0)  # q is made, and never negative

  def verify(params, cache, tokens, i):
    cache = cache.replace(length=length - 1 + i)
    logits, cache = target.extend(params, cache, tokens)
    p = distribution(logits, sampling)
    verdict = speculative_sample(keys_at(i), tokens[:, 1:], some_q, p)
    return cache, jnp.roll(tokens, 1, axis=1).at[:, 0].set(verdict.next_token)

  start = lambda model_start: jax.jit(lambda params: model_start(params, prompt, num_slots))
  target_start, draft_start = start(target.start), start(draft.start)
  target_cache, draft_state = target_start(target_params), draft_start(draft_params)
  seconds, _ = interleaved_medians(
    [
      chained(target_params, target_cache, step, 1),
      chained(draft_params, draft_state, propose, gamma),
      chained(target_params, target_cache, verify, gamma + 1),
      lambda: target_start(target_params),
      lambda: draft_start(draft_params),
    ],
    repeats,
  )
  return Costs(
    target_step=seconds[0] / chain,
    draft_step=seconds[1] / chain / gamma,
    verify=seconds[2] / chain,
    target_start=seconds[3],
    draft_start=seconds[4],
  )
