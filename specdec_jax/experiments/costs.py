"""What decoding is made of, in seconds: a target step, a verification, a draft step.

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
    draft_step: what proposing adds to a verification, divided by gamma (Definition 7 counts gamma
      runs of M_q). Timed within the round, where each model finds the cache full of the other.
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

  def judge(params, cache, block, q, i):
    cache = cache.replace(length=length - 1 + i)
    logits, cache = target.extend(params, cache, block)
    p = distribution(logits, sampling)
    verdict = speculative_sample(keys_at(i), block[:, 1:], q, p)
    return cache, verdict.next_token[:, None]

  def step(params, cache, newest, i):
    return judge(params, cache, newest, some_q[:, :0], i)

  def verify(params, cache, newest, i):
    return judge(params, cache, jnp.broadcast_to(newest, (batch, gamma + 1)), some_q, i)

  def whole_round(params, state, newest, i):
    target_params, draft_params = params
    cache, draft_state = state
    text = jnp.broadcast_to(newest, (batch, num_slots))
    guesses, q, draft_state = draft.propose(draft_params, draft_state, text, length + i, keys_at(i))
    block = jnp.concatenate([newest, guesses], axis=1)
    cache, newest = judge(target_params, cache, block, q, i)
    return (cache, draft_state), newest

  def chained(link, params, state):
    """`chain` calls of link: (params, state, newest [B, 1], i) -> (state, newest), compiled."""
    newest = jnp.full((batch, 1), 2, jnp.int32)
    run = lambda params, state: lax.fori_loop(
      0, chain, lambda i, carry: link(params, *carry, i), (state, newest)
    )[1]
    compiled = jax.jit(run).lower(params, state).compile()
    return lambda: compiled(params, state)

  start = lambda model_start: jax.jit(lambda params: model_start(params, prompt, num_slots))
  target_start, draft_start = start(target.start), start(draft.start)
  target_cache, draft_state = target_start(target_params), draft_start(draft_params)
  seconds, _ = interleaved_medians(
    [
      chained(step, target_params, target_cache),
      chained(verify, target_params, target_cache),
      chained(whole_round, (target_params, draft_params), (target_cache, draft_state)),
      lambda: target_start(target_params),
      lambda: draft_start(draft_params),
    ],
    repeats,
  )
  target_step, verification, round_ = (s / chain for s in seconds[:3])
  return Costs(
    target_step=target_step,
    draft_step=(round_ - verification) / gamma,
    verify=verification,
    target_start=seconds[3],
    draft_start=seconds[4],
  )
