"""Logits processors: functions that adjust the logits of the next token, given the text before it.

The adjusted logits at a node of a block depend on its logits, on the prompt and length limit of its
row, and on the text that ends at the node: the committed tokens and the path to the node. They do
not depend on siblings or other rows. So the target with processors is a target like any other, and
exact verifiers remain exact for it. The processors here have the definitions of transformers.

Axis letters are those of `core.types`; n is a number of sequences or edges, m the number of nodes
of a trie, M the number of tokens per padded sequence, and F the number of forced tokens.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from specdec_jax.core.arrays import highest
from specdec_jax.core.context import Prefixes
from specdec_jax.core.settings import HashableArray, Settings, traced
from specdec_jax.errors import InputError, require_count, shown


class LogitsProcessor(Settings, abc.ABC):
  """Base class of logits processors: frozen dataclasses whose fields may be traced (`settings`)."""

  @abc.abstractmethod
  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    """Return the adjusted logits of the token after each text; -inf excludes a token."""


Processors = tuple[LogitsProcessor, ...]


def process(
  processors: Processors, logits: Float[Array, "B K V"], prefixes: Prefixes
) -> Float[Array, "B K V"]:
  """Return logits after all processors, in their order, in float32.

  At a node where the processors exclude all tokens, the logits are returned unadjusted.
  """
  logits = processed = logits.astype(jnp.float32)
  for processor in processors:
    processed = processor(processed, prefixes)
    if processed.shape != logits.shape:
      raise InputError(
        f"The logits_processor {shown(processor)} returns logits of shape {processed.shape}; they "
        f"must keep their shape {logits.shape}."
      )
  return jnp.where(jnp.isneginf(highest(processed)), logits, processed)


_ANY = -1  # matches every token at the beginning of a shorter sequence
_NONE = -2  # token before the beginning of a text; matches no token


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty(LogitsProcessor):
  """Penalty for tokens that occur in the text (Keskar et al., 2019).

  Positive logits are divided by the penalty, and negative logits are multiplied by it.

  Attributes:
    penalty: above 1 to discourage repetition.
    of_prompt: whether to penalize tokens that occur in the prompt, instead of those in the text.
      With the inverse of the penalty, this is `encoder_repetition_penalty` of transformers; there,
      padding of the prompt counts as a token, and here it does not.
    pad_id: token that pads sources; None for a decoder-only model, whose texts begin with the
      prompt.
  """

  penalty: float = traced(1.0)
  of_prompt: bool = False
  pad_id: int | None = 0

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    tokens, exists = _tokens_of(prefixes, self.of_prompt, self.pad_id)
    occurs = _occurring(tokens, exists, logits.shape[-1])
    penalized = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
    return jnp.where(occurs, penalized, logits)


@dataclasses.dataclass(frozen=True)
class NoRepeatNgram(LogitsProcessor):
  """Exclude tokens that would repeat an n-gram of the text.

  Attributes:
    size: n, at least 1.
    of_prompt: whether n-grams of the prompt must not be repeated, instead of those of the text
      (`encoder_no_repeat_ngram_size` of transformers).
    pad_id: see `RepetitionPenalty`.
  """

  size: int = traced(0)
  of_prompt: bool = False
  pad_id: int | None = 0

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    tokens, exists = _tokens_of(prefixes, self.of_prompt, self.pad_id)
    positions = jnp.arange(tokens.shape[-1])

    def match_one_more(i: Any, matches: Bool[Array, "B K T"]) -> Bool[Array, "B K T"]:
      """Require that the token i before a position equals the i-th token from the text's end."""
      before = jnp.take(tokens, jnp.maximum(positions - i, 0), axis=2)
      return matches & (before == _token_before_end(prefixes, i))

    # Position j completes an n-gram if the n - 1 tokens before it are the last ones of the text. No
    # position does if n exceeds the number of positions.
    enough = (prefixes.length >= self.size - 1)[..., None]
    enough &= (positions >= self.size - 1)[None, None]
    last = jnp.minimum(self.size, len(positions))
    matches = lax.fori_loop(1, last, match_one_more, exists & enough)
    tokens = jnp.broadcast_to(tokens, matches.shape)
    return jnp.where(_occurring(tokens, matches, logits.shape[-1]), -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class SequenceBias(LogitsProcessor):
  """Add a bias to the logit of a sequence's last token if the text ends with the tokens before it.

  As in transformers, a sequence of several tokens has no effect on a text with fewer tokens.

  Attributes:
    sequences: [n, M], tokens of each sequence, padded at the beginning with -1.
    biases: [n], bias of each sequence; -inf excludes its last token.
  """

  sequences: HashableArray = traced(HashableArray(np.zeros((0, 1), np.int32)))
  biases: HashableArray = traced(HashableArray(np.zeros(0, np.float32)))

  @classmethod
  def of(cls, biases: Mapping[tuple[int, ...], float]) -> "SequenceBias":
    """Return the processor for one bias per sequence, with n and M padded to powers of two."""
    longest = _round_up(max(4, *map(len, biases)))
    sequences = np.full((_round_up(max(8, len(biases))), longest), _ANY, np.int32)
    values = np.zeros(len(sequences), np.float32)
    for row, (sequence, bias) in enumerate(biases.items()):
      sequences[row, longest - len(sequence) :], values[row] = sequence, bias
    sequences[len(biases) :, -1] = 0  # with a bias of 0
    return cls(HashableArray(sequences), HashableArray(values))

  @classmethod
  def excluding(cls, sequences: Sequence[Sequence[int]]) -> "SequenceBias":
    """Return the processor that excludes sequences (`bad_words_ids`, `suppress_tokens`)."""
    return cls.of({tuple(sequence): -np.inf for sequence in sequences})

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    sequences, biases = jnp.asarray(self.sequences), jnp.asarray(self.biases)
    before, last = sequences[None, None, :, :-1], sequences[:, -1]
    num_before = before.shape[3]
    ends = _token_before_end(prefixes, jnp.arange(num_before, 0, -1))[:, :, None]
    matches = ((before == _ANY) | (before == ends)).all(axis=-1)
    lengths = (sequences != _ANY).sum(axis=1)[None, None]
    matches &= (lengths == 1) | (lengths <= prefixes.length[..., None])
    return logits.at[:, :, last].add(jnp.where(matches, biases, 0.0))


@dataclasses.dataclass(frozen=True)
class MinLength(LogitsProcessor):
  """Exclude EOS until a text has a minimum length.

  Attributes:
    min_length: minimum number of tokens before EOS, including the start token of T5 or the prompt.
    min_new_tokens: minimum number of generated tokens before EOS.
  """

  min_length: int = traced(0)
  min_new_tokens: int = traced(0)
  eos_ids: HashableArray = traced(HashableArray(np.zeros(0, np.int32)))

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    num_new = prefixes.length - prefixes.prompt_length[:, None]
    short = (prefixes.length < self.min_length) | (num_new < self.min_new_tokens)
    excluded = short[..., None] & _among(self.eos_ids, logits.shape[-1])[None, None]
    return jnp.where(excluded, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class SuppressAtBegin(LogitsProcessor):
  """Exclude tokens as the first generated token (`begin_suppress_tokens`).

  Attributes:
    after_forced: whether the first token after a start token is forced (`forced_bos_token_id`); the
      rule then holds for the token after it, as in transformers.
  """

  tokens: HashableArray = traced(HashableArray(np.zeros(0, np.int32)))
  after_forced: bool = False

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    begin = prefixes.prompt_length
    if self.after_forced:
      begin = jnp.where(begin == 1, 2, begin)
    at_begin = (prefixes.length == begin[:, None])[..., None]
    excluded = at_begin & _among(self.tokens, logits.shape[-1])[None, None]
    return jnp.where(excluded, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class ForcedTokens(LogitsProcessor):
  """Allow only certain tokens as the first or as the last token of a text.

  Attributes:
    first: tokens allowed after the start token (`forced_bos_token_id`); None allows all.
    last: tokens allowed as the last token of a text that reaches its limit (`forced_eos_token_id`);
      None allows all.
  """

  first: HashableArray | None = traced(None)
  last: HashableArray | None = traced(None)

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    at_start = prefixes.length == 1
    at_end = prefixes.length == prefixes.limit[:, None] - 1
    for tokens, is_forced in ((self.first, at_start), (self.last, at_end)):
      if tokens is not None:
        forced = jnp.where(_among(tokens, logits.shape[-1]), 0.0, -jnp.inf)
        logits = jnp.where(is_forced[..., None], forced, logits)
    return logits


@dataclasses.dataclass(frozen=True)
class ForcedPrefix(LogitsProcessor):
  """Force the first tokens of each output: `tokens` [B, F], padded at the end with -1."""

  tokens: HashableArray | Array = traced(HashableArray(np.zeros((1, 0), np.int32)))

  @classmethod
  def of(cls, rows: Sequence[Sequence[int]]) -> "ForcedPrefix":
    """Return the processor for the forced tokens of each row."""
    tokens = np.full((len(rows), _round_up(max(1, *map(len, rows)))), _ANY, np.int32)
    for row, prefix in enumerate(rows):
      tokens[row, : len(prefix)] = prefix
    return cls(HashableArray(tokens))

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    tokens = jnp.asarray(self.tokens)
    index = prefixes.length - prefixes.prompt_length[:, None] + (tokens >= 0).sum(axis=1)[:, None]
    token = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
    is_forced = prefixes.length < prefixes.prompt_length[:, None]
    forced = jnp.where(token[..., None] == jnp.arange(logits.shape[-1])[None, None], 0.0, -jnp.inf)
    return jnp.where(is_forced[..., None], forced, logits)


@dataclasses.dataclass(frozen=True)
class Renormalize(LogitsProcessor):
  """Normalize logits to log-probabilities (`renormalize_logits` of transformers)."""

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    return jnp.where(jnp.isneginf(logits), logits, jax.nn.log_softmax(logits))


@dataclasses.dataclass(frozen=True)
class FunctionProcessor(LogitsProcessor):
  """Apply a function to the logits of each token and to the text before the token.

  Attributes:
    function: JAX function of (logits [V], tokens [T], length) that returns logits [V]. Tokens are 0
      from `length` on. The result must depend on these arguments only.
  """

  function: Callable[[Array, Array, Array], Array]

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    of_rows = jax.vmap(jax.vmap(self.function))
    return of_rows(logits, prefixes.tokens, prefixes.length)


def _tokens_of(
  prefixes: Prefixes, of_prompt: bool, pad_id: int | None
) -> tuple[Int[Array, "B K T"], Bool[Array, "B K T"]]:
  """Return the tokens of each text or of its prompt, and whether each of them exists."""
  if of_prompt and pad_id is not None:
    tokens = prefixes.prompt[:, None]
    # Padding follows the last token of a source.
    return tokens, jnp.cumsum(tokens[..., ::-1] != pad_id, axis=-1)[..., ::-1] > 0
  tokens, length = prefixes.tokens, prefixes.length
  if of_prompt:
    length = jnp.minimum(length, prefixes.prompt_length[:, None])
  return tokens, jnp.arange(tokens.shape[-1])[None, None] < length[..., None]


def _token_before_end(prefixes: Prefixes, i: Any) -> Int[Array, "B K M"]:
  """Return the i-th last token of each text, for one i or [M]; _NONE if there are fewer tokens."""
  index = prefixes.length[..., None] - jnp.reshape(i, (1, 1, -1))
  token = jnp.take_along_axis(prefixes.tokens, jnp.maximum(index, 0), axis=2)
  return jnp.where(index < 0, _NONE, token)


def _occurring(
  tokens: Int[Array, "B K T"], exists: Bool[Array, "B K T"], vocab_size: int
) -> Bool[Array, "B K {vocab_size}"]:
  """Return a mask of the vocabulary: the tokens that are in `tokens` where `exists` is true."""

  def occurring(row: Int[Array, " T"]) -> Bool[Array, " V"]:
    return jnp.zeros(vocab_size, bool).at[row].set(True, mode="drop")

  return jax.vmap(jax.vmap(occurring))(jnp.where(exists, tokens, vocab_size))


def _among(tokens: Any, vocab_size: int) -> Bool[Array, " {vocab_size}"]:
  return jnp.zeros(vocab_size, bool).at[jnp.asarray(tokens)].set(True, mode="drop")


def _round_up(count: int) -> int:
  """Return the smallest power of two that is at least `count`."""
  return 1 << (count - 1).bit_length()


_OUTSIDE = -1  # node of a text that no sequence begins with


@dataclasses.dataclass(frozen=True)
class TrieConstraint(LogitsProcessor):
  """Logits processor that allows only the sequences of a trie, each followed by EOS.

  The sequences start after the prompt and a forced prefix. If no sequence begins with the generated
  tokens, all tokens are excluded, so that `process` does not adjust the logits.

  The trie is stored like a CSR matrix (compressed sparse rows), as in STATIC (2026): nodes are in
  level order, the edges of a node are adjacent and in ascending order of their tokens, and edge e
  leads to node e + 1. The node of a text is found by following its generated tokens from the root,
  with a binary search per token.

  Attributes:
    tokens: [n], token of each edge.
    first_edges: [m + 1], first edge of each node; the last entry is n.
    max_children: largest number of edges of a node, rounded up to a power of two.
  """

  tokens: HashableArray = traced(HashableArray(np.zeros(0, np.int32)))
  first_edges: HashableArray = traced(HashableArray(np.zeros(1, np.int32)))
  max_children: int = 1

  @classmethod
  def of(cls, sequences: Sequence[Sequence[int]], eos_id: int) -> "TrieConstraint":
    """Return the constraint for `sequences` of tokens, given without EOS."""
    if not len(sequences):
      raise InputError("There are no sequences to allow; give at least one.")
    ordered = sorted({(*sequence, eos_id) for sequence in sequences})
    for sequence in ordered:
      for token in sequence:
        require_count("a token of an allowed sequence", token, 0)
    # Level by level: a node is a range of `ordered`, whose sequences share their first tokens.
    tokens, first_edges = [], [0]
    level = [(0, len(ordered))]
    for depth in range(max(map(len, ordered))):
      next_level = []
      for first, last in level:
        row = first
        while row < last:
          token, start = ordered[row][depth], row
          while row < last and ordered[row][depth] == token:
            row += 1
          tokens.append(token)
          longer = start if len(ordered[start]) > depth + 1 else row  # the end of a sequence
          next_level.append((longer, row))
        first_edges.append(len(tokens))
      level = next_level
    first_edges += [len(tokens)] * (len(tokens) + 2 - len(first_edges))
    edges = np.array(first_edges, np.int32)
    most = int(np.diff(edges).max())
    return cls(
      HashableArray(np.array(tokens, np.int32)), HashableArray(edges), 1 << (most - 1).bit_length()
    )

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    tokens, first_edges = jnp.asarray(self.tokens), jnp.asarray(self.first_edges)
    node = self._nodes(tokens, first_edges, prefixes)
    first = first_edges[jnp.maximum(node, 0)][..., None]
    last = jnp.where(node == _OUTSIDE, 0, first_edges[jnp.maximum(node, 0) + 1])[..., None]
    edges = first + jnp.arange(self.max_children)[None, None]
    vocab_size = logits.shape[-1]
    allowed = jnp.where(edges < last, tokens[jnp.minimum(edges, len(tokens) - 1)], vocab_size)

    def mask(row: Int[Array, " children"]) -> Bool[Array, " V"]:
      return jnp.zeros(vocab_size, bool).at[row].set(True, mode="drop")

    return jnp.where(jax.vmap(jax.vmap(mask))(allowed), logits, -jnp.inf)

  def _nodes(
    self, tokens: Int[Array, " n"], first_edges: Int[Array, " m"], prefixes: Prefixes
  ) -> Int[Array, "B K"]:
    """Return the node that the generated tokens of each text lead to; _OUTSIDE if there is none."""
    num_new = prefixes.length - prefixes.prompt_length[:, None]

    def find(i: Any, node: Int[Array, "B K"]) -> Int[Array, "B K"]:
      """Follow the edge of the i-th new token."""
      at = (prefixes.prompt_length[:, None] + i)[..., None]
      at = jnp.broadcast_to(at, (*node.shape, 1))
      token = jnp.take_along_axis(prefixes.tokens, at, axis=2, mode="clip")[..., 0]
      known = jnp.maximum(node, 0)
      low, end = first_edges[known], first_edges[known + 1]

      def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_below = (middle < high) & (tokens[jnp.minimum(middle, len(tokens) - 1)] < token)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

      low, _ = lax.fori_loop(0, self.max_children.bit_length() + 1, halve, (low, end))
      found = (low < end) & (tokens[jnp.minimum(low, len(tokens) - 1)] == token)
      next_node = jnp.where(found & (node != _OUTSIDE), low + 1, _OUTSIDE)
      return jnp.where(i < num_new, next_node, node)

    return lax.fori_loop(0, num_new.max(), find, jnp.zeros_like(prefixes.length))
