"""Texts in, texts out: batches, lengths and keys are handled here."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding import (
  FreeDraft,
  decoded,
  one_round,
  require_finite,
  speculative_decode,
  start,
)
from specdec_jax.errors import require_count, require_seed, require_types
from specdec_jax.protocols import Decoded, Rounds
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.trees import Tree, chain


class Output(str):
  """A text that the target wrote, and what it took.

  Attributes:
    tokens: [T], EOS last unless the limit came first.
    rounds: R of them, of this text alone: fields [R, ...] of `protocols.Rounds`.
  """

  tokens: np.ndarray
  rounds: Rounds

  def __new__(cls, text: str, tokens: np.ndarray, rounds: Rounds) -> "Output":
    self = super().__new__(cls, text)
    self.tokens, self.rounds = tokens, rounds
    return self

  @property
  def acceptance_length(self) -> float:
    """Tokens a round, which is one pass of the target."""
    return len(self.tokens) / len(self.rounds.num_emitted)


def generate(
  self: Any,
  texts: Sequence[str],
  *,
  gamma: int = 5,
  tree: Sequence[int] | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  max_new_tokens: int = 128,
  batch_size: int = 1,
  seed: int = 0,
  lenience: float = 1.0,
) -> list[Output]:
  """What the target writes for texts, by speculative decoding.

  Args:
    texts: sources, or what a decoder-only model goes on from. Those longer than `max_source_tokens`
      are cut (`cut` says where).
    gamma: guesses a round; 0 decodes plainly.
    tree: parents of a tree of guesses (`trees.Tree`) instead of a chain of gamma.
    temperature: 0 takes the likeliest token.
    top_k: sample from the k likeliest tokens only; 0 from all.
    top_p: sample from the fewest tokens that have this much probability.
    max_new_tokens: limit for a text, EOS counted.
    batch_size: texts decoded together; whatever it is, outputs are the same.
    seed: of all sampling. A text's draws depend on it and on the text's place among `texts`.
    lenience: below 1 more guesses are accepted, and outputs are no longer the target's (A.5).

  Returns:
    For each text its output, a `str` with its tokens and rounds.

  Raises:
    InputError: an argument is not what it should be, or memory does not hold what is asked.
  """
  decode, found = _decoder(self, generate, locals()), []
  self.require_batch_size(batch_size)
  for at in range(0, len(texts), batch_size):
    batch = [*texts[at : at + batch_size]]
    rows = batch + batch[:1] * (batch_size - len(batch))  # the last batch has the others' shape
    keys = row_keys(seed, at, batch_size)
    result = decode(self.prompt(rows), keys, max_new_tokens=max_new_tokens)
    result = require_finite(jax.device_get(result))
    found += [_output(self, result, row) for row in range(len(batch))]
  return found


def stream(
  self: Any,
  text: str,
  *,
  gamma: int = 5,
  tree: Sequence[int] | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  max_new_tokens: int = 128,
  seed: int = 0,
  lenience: float = 1.0,
) -> Iterator[str]:
  """The output of one text in pieces, at most one a round; joined they are what `generate` gives.

  Arguments as in `generate`. A round is a program of its own, for which the host waits.
  """
  decode = _decoder(self, stream, locals())
  models, rng = decode.args, row_keys(seed, 0, 1)
  rule = decode.keywords.get("rule", TokenRule(Sampling(temperature, top_k, top_p)))
  if decode.func is not speculative_decode:  # plain decoding, which is told in the same way
    models = self.target, FreeDraft(), self.target_params, ()
  state, said = _begin(*models, self.prompt([text]), max_new_tokens), ""
  while not state.done[0]:
    state = _go_on(*models, rule, rng, self.vocabulary.eos_id, state)
    whole = _output(self, require_finite(jax.device_get(decoded(state))), 0)
    piece = whole.removeprefix(said)
    # Half a character is held back until the other half is there.
    if piece and (state.done[0] or not whole.endswith("\ufffd")):
      yield piece
      said = whole


_begin = jax.jit(start, static_argnames=("target", "draft", "limit"))
_go_on = jax.jit(one_round, static_argnames=("target", "draft", "rule", "eos_id"))


def _decoder(pair: Any, of: Callable, asked: Mapping[str, Any]) -> functools.partial[Decoded]:
  """Of the pair, for arguments of `generate` or `stream`, which are checked."""
  require_types(of, asked)
  require_seed(asked["seed"])
  require_count("max_new_tokens", asked["max_new_tokens"])
  require_count("gamma", asked["gamma"], least=0)
  sampling = Sampling(asked["temperature"], asked["top_k"], asked["top_p"])
  tree = chain(asked["gamma"]) if asked["tree"] is None else Tree(asked["tree"])
  return pair.decoder(sampling, tree, asked["lenience"])


def _output(pair: Any, result: Decoded, row: int) -> Output:
  tokens = np.asarray(result.tokens[row, : result.lengths[row]])
  ran = result.rounds.num_emitted[:, row] > 0
  rounds = jax.tree.map(lambda of_all: of_all[ran, row], result.rounds)
  return Output(pair.vocabulary.decode(tokens), tokens, rounds)
