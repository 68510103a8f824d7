"""What a model and a draft promise, and the records that travel between them and the loops.

Axes used throughout: B batch, G = gamma guesses in a round, K tokens in a block, P prompt
tokens, T target slots, R rounds, V vocabulary.

A plug-in is a NamedTuple of pure functions, made by a lower-case factory such as
`models.t5.t5_model`, `models.gpt.gpt_model` or `drafts.model.model_draft`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array


class Model(NamedTuple):
  """An autoregressive model that reads blocks of tokens at each row's own position.

  The invariant of the loops: a cache of length L holds every committed token but the newest,
  which is the first of the next block. Any cache has a field `length` [B]; setting it is
  the rollback: slots at or past it are masked, then overwritten.

  Attributes:
    begin: prompt [B, P] -> (tokens [B, C], length [B]): what is committed before the first
      round. T5: its start token; a decoder-only model: the prompt. A prompt is, for both, tokens,
      EOS and padding, as `Vocabulary.encode` gives them; rows may be of different lengths.
    start: (params, prompt [B, P], num_slots) -> cache of everything committed but the newest.
    extend: (params, cache, tokens [B, K]) -> (logits [B, K, V], cache): append K tokens to
      each row at its `cache.length`; logits[:, i] predict the token after tokens[:, i]. K = 1
      is a decode step, K = G + 1 parallel verification. num_slots leaves room for the last
      block past the end of the text, so no write is ever clamped into live slots.
    vocab_size: V.
    eos_id: ends a text, unless whoever decodes says otherwise.
  """

  begin: Callable[[Array], tuple[Array, Array]]
  start: Callable[[Any, Array, int], Any]
  extend: Callable[[Any, Any, Array], tuple[Array, Any]]
  vocab_size: int
  eos_id: int


class Draft(NamedTuple):
  """An approximation model M_q (Section 3.6): proposes gamma guesses and says how it drew them.

  Attributes:
    start: (params, prompt [B, P], num_slots) -> state.
    propose: (params, state, tokens [B, T], length [B], rng [B]) -> (guesses [B, G], q [B, G, V],
      state). `tokens` are the committed tokens, `length` of them in each row, so a draft that
      copies needs no state and one with a cache rolls back by itself. q must be the very
      distribution each guess was drawn from: exactness rests on it.
    gamma: G.
  """

  start: Callable[[Any, Array, int], Any]
  propose: Callable[[Any, Any, Array, Array, Array], tuple[Array, Array, Any]]
  gamma: int


class Verdict(NamedTuple):
  """One round judged (Algorithm 1).

  Attributes:
    num_accepted: [B], n, leading guesses that stand, 0..G.
    next_token: [B], the token after them: the correction, or the bonus if n = G.
  """

  num_accepted: Array
  next_token: Array


class Rounds(NamedTuple):
  """What happened in each round, in fixed shape; rows past their end have num_emitted 0.

  Attributes:
    guesses: [R, B, G]; -1 for those not made, where gamma changes (`adaptive`).
    num_accepted: [R, B], n of the verdict.
    next_token: [R, B].
    num_emitted: [R, B], tokens that entered the text: n + 1, less what fell past EOS or the limit.
  """

  guesses: Array
  num_accepted: Array
  next_token: Array
  num_emitted: Array

  def judged(self) -> tuple[Array, Array]:
    """Accepted and rejected guesses of each row, [B] both; one behind EOS or the limit was neither.

    alpha's empirical counterpart is accepted / (accepted + rejected).
    """
    n, emitted = self.num_accepted, self.num_emitted
    rejected = (n < (self.guesses >= 0).sum(axis=-1)) & (emitted == n + 1)
    return n.clip(None, emitted).sum(axis=0), rejected.sum(axis=0)


class Decoded(NamedTuple):
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
