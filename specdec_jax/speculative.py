"""Speculative sampling: accept, correct or extend the guesses of one round (Section 2.3)."""

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.errors import InputError
from specdec_jax.protocols import Verdict
from specdec_jax.sampling import sample, split_keys


def speculative_sample(
  rng: Array,
  draft_tokens: Array,
  draft_probs: Array,
  target_probs: Array,
  lenience: float = 1.0,
) -> Verdict:
  """Judge the guesses so that what is emitted is distributed as the target (Algorithm 1).

  Args:
    rng: one key for the batch, or keys [B] so that a row does not depend on its neighbours.
    draft_tokens: guesses x_1..x_G, [B, G].
    draft_probs: q_1..q_G, [B, G, V]: the distributions the guesses were drawn from.
    target_probs: p_1..p_{G+1}, [B, G + 1, V], adjusted by the same sampling method.
    lenience: l in (0, 1] multiplies q (Appendix A.5); no token's probability grows past p / l.

  Returns:
    The verdict: n accepted guesses and the token after them.
  """
  batch, gamma = draft_tokens.shape
  vocab_size = target_probs.shape[-1]
  if (draft_probs.shape, target_probs.shape) != (
    (batch, gamma, vocab_size),
    (batch, gamma + 1, vocab_size),
  ):
    raise InputError(
      f"draft_tokens {draft_tokens.shape} [B, G] go with draft_probs [B, G, V] and target_probs "
      f"[B, G + 1, V]; given {draft_probs.shape} and {target_probs.shape}."
    )
  if not 0 < lenience <= 1:
    raise InputError(f"lenience is {lenience}; it must lie in (0, 1], with 1 for exactness.")
  keys = split_keys(rng, batch)
  accept_rng, next_rng = jax.vmap(jax.random.split, out_axes=1)(keys)

  # Accept guess i with probability min(1, p_i / (l q_i)); n counts those before the first refusal.
  # Compared, not divided, and strictly: u < 1, so p >= q always passes and p = 0 never does.
  u = jax.vmap(lambda key: jax.random.uniform(key, (gamma,)))(accept_rng)
  of_guesses = lambda probs: jnp.take_along_axis(probs, draft_tokens[..., None], axis=-1)[..., 0]
  accepted = u * lenience * of_guesses(draft_probs) < of_guesses(target_probs[:, :gamma])
  num_accepted = jnp.cumprod(accepted, axis=1).sum(axis=1)

  # The next token comes from norm(max(0, p_{n+1} - l q_{n+1})). With q_{G+1} = 0 that is also
  # the bonus token's p_{G+1}.
  at_next = lambda probs: jnp.take_along_axis(probs, num_accepted[:, None, None], axis=1)[:, 0]
  q = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0)))
  weights = residual(at_next(target_probs), at_next(q), lenience)
  return Verdict(num_accepted, sample(next_rng, weights))


def residual(p: Array, q: Array, lenience: float = 1.0) -> Array:
  """Weights [..., V] of the token that replaces a refused guess: max(0, p - l q) (Section 2.3).

  p = q up to rounding can leave nothing at all; a refusal then had probability 0 up to rounding,
  and p itself is the right limit.
  """
  q = lenience * q
  # Decided by comparing: a compiler may work out p - q twice, rounded in two ways (a fused
  # multiply-add in one), and then what is found to be left in one place is not there in the other.
  above = p > q
  left = jnp.where(above, jnp.maximum(p - q, jnp.finfo(p.dtype).tiny), 0.0)
  return jnp.where(above.any(axis=-1, keepdims=True), left, p)


def emitted_distribution(p: Array, q: Array, lenience: float = 1.0) -> Array:
  """Distribution [..., V] of what one guess from q and its judgement emit: p itself if l = 1.

  min(q, p / l) + (1 - sum min(q, p / l)) norm(residual), which never exceeds p / l (Appendix A.5).
  """
  accepted = jnp.minimum(q, p / lenience)
  weights = residual(p, q, lenience)
  refused = 1 - accepted.sum(axis=-1, keepdims=True)
  return accepted + refused * weights / weights.sum(axis=-1, keepdims=True)


def accept_near_argmax(p: Array, logits: Array, guesses: Array, lenience: float) -> Array:
  """Argmax with lenience: the target agrees to any guess with p(x) >= l max p (Appendix A.5).

  Args:
    p: one-hots of the target's argmax, [..., V].
    logits: what they were made of, [..., V]; the rule compares their softmax.
    guesses: [...].
    lenience: l in (0, 1].

  Returns:
    p, with the guess in place of the argmax wherever the guess is near enough.
  """
  of_guess = jnp.take_along_axis(logits, guesses[..., None], axis=-1)
  near = of_guess >= logits.max(axis=-1, keepdims=True) + jnp.log(lenience)
  return jnp.where(near, jax.nn.one_hot(guesses, logits.shape[-1]), p)
