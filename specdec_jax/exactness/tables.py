"""Rounds on tables: one round from a few texts, repeated with many keys, against a known p.

The target is a table: its logits depend on the last two tokens, so p is known without a forward
pass. The tokens that a round emits are continued by samples from p, up to one token more than the
depth of the tree. If the verifier is exact, and draft tokens have the q that the draft reports,
each token of these texts has distribution p given the tokens before it, whatever was accepted.

The verifier is first tested alone, with proposals that are sampled here from other tables
(`TableDraft`), and then with the draft of a pair, which continues real texts.
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
from jaxtyping import Bool, Float, Int, Key
from scipy import optimize, special, stats

from specdec_jax.core.arrays import gather, repeat_rows
from specdec_jax.core.context import Context, Prompt, prompt_ids
from specdec_jax.core.decode import Decoder, DecodeState
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, NodeLayout, Tree
from specdec_jax.core.types import (
  AnyArray,
  Draft,
  Extended,
  First,
  Keys,
  Length,
  Outcome,
  Params,
  Path,
  Proposal,
  Tokens,
  Verifier,
  WrappedDraft,
)
from specdec_jax.exactness.martingale import POWER, TOKEN_SCORES, Drift
from specdec_jax.exactness.paths import shapes_of
from specdec_jax.exactness.processed import target_distribution
from specdec_jax.exactness.round_scores import token_scores

V, EOS = 5, 1  # of the tables on which a verifier is tested alone
ROWS = 2**16  # rounds of one call of a verifier alone
NUM_LAST = 16  # R, for the tables of a pair
MAX_CONTEXTS = 4  # texts from which rounds of a pair begin
MIN_EXPECTED = 20  # tokens that are expected less often share a cell of a G-test

# Without optimizations, programs compile in a third of the time; with few of them, in half of the
# time, and then run as fast on a CPU as with all.
quick_jit, long_jit = (
  functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": level})
  for level in ("0", "1")
)

# Logits or probabilities of the next token. Entry [i + 1, j] is for a text that ends with token i
# and draft token j, and [0, j] for a committed text that ends with token j, all modulo R.
Table = Float[Array, "R+1 R V"]


def at_nodes(
  table: Table, tokens: Int[Array, "B K"], tree: NodeLayout | None = None
) -> Float[Array, "B K V"]:
  """Return the entries at the nodes of a block whose first token is the last committed one."""
  tokens = jnp.maximum(tokens, 0) % table.shape[1]  # -1 was not proposed
  before = tokens[:, :-1]
  if isinstance(tree, Tree | DynamicTree) and tree.num_nodes == tokens.shape[1]:
    before = gather(tokens, jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), before.shape))
  return table[jnp.pad(before + 1, ((0, 0), (1, 0))), tokens]


@dataclasses.dataclass(frozen=True)
class TableModel:
  """Model whose parameters are a `Table` of logits. Texts begin with the prompt's first token.

  As the target of a single round it can take the place of another model. In other uses it is a
  model only if the logits depend on the last token alone.

  Attributes:
    hidden_size: E, the number of hidden states, which are 0.
  """

  vocab_size: int = V
  eos_id: int = EOS
  hidden_size: int = 1

  def prompt_tokens(self, prompt: Prompt) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    return prompt_ids(prompt)[:, :1] % self.vocab_size, jnp.ones(len(prompt), jnp.int32)

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    return jnp.zeros((len(prompt), 1, self.hidden_size)), ()

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    hidden = jnp.zeros((*tokens.shape, self.hidden_size))
    return at_nodes(params, tokens, tree), hidden, cache

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    return cache


class TableProposals(NamedTuple):
  """Parameters of a `TableDraft`.

  Attributes:
    q: logits of the draft.
    is_independent: whether siblings are sampled with replacement, by the last committed token.
    is_short: whether some draft tokens are not proposed, by the last committed token.
    tokens: draft tokens [R, N] of a dynamic tree, by the last committed token.
    parents: their parents [R, N].
  """

  q: Table
  is_independent: Bool[AnyArray, " R"]
  is_short: Bool[AnyArray, " R"]
  tokens: Any = None
  parents: Any = None


@dataclasses.dataclass(frozen=True)
class TableDraft(Draft):
  """Draft that samples from tables, node by node, with no code of other drafts.

  Attributes:
    greedy: whether all tokens are selected deterministically; q is then left out.
  """

  tree: AnyTree
  greedy: bool = False

  def propose(
    self, params: TableProposals, state: Any, context: Context, rng: Keys
  ) -> tuple[Proposal, Any]:
    start = context.last_token
    if isinstance(self.tree, DynamicTree):
      tree = dataclasses.replace(self.tree, parents=params.parents[start])
      return Proposal(params.tokens[start], tree=tree), state
    parents, nodes, q = self.tree.parents, [start], []
    is_proposed = [jnp.ones(len(start), bool)]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (len(parents), V)))(rng)
    for i, parent in enumerate(parents):
      before = nodes[parents[parent - 1]] if parent else jnp.full(len(start), -1)
      probs = jax.nn.softmax(params.q[before + 1, nodes[parent]])
      siblings = [nodes[j + 1][:, None] for j in range(i) if parents[j] == parent]
      if siblings:
        is_sibling = (jnp.stack(siblings) == jnp.arange(V)).any(axis=0)
        is_sibling &= ~params.is_independent[start][:, None]
        # If q leaves only siblings, the first other token is selected deterministically.
        rest = jnp.where(is_sibling, 0.0, probs)
        other = jax.nn.one_hot(is_sibling.argmin(axis=1), V)
        probs = jnp.where(rest.any(axis=1, keepdims=True), rest, other)
        probs /= probs.sum(axis=1, keepdims=True)
      nodes.append((probs if self.greedy else jnp.log(probs) + noise[:, i]).argmax(axis=1))
      # Whether a token is proposed depends on the tokens before it, not on the token itself.
      stops = params.is_short[start] & ((nodes[parent] + i) % 3 == 0)
      is_proposed.append(is_proposed[parent] & ~stops)
      q.append(jnp.where(is_proposed[-1][:, None], probs, 0.0))
    tokens = jnp.where(jnp.stack(is_proposed[1:], 1), jnp.stack(nodes[1:], 1), -1)
    return Proposal(tokens, None if self.greedy else jnp.stack(q, 1)), state


class TextCounts(NamedTuple):
  """G-tests of the tokens of texts on tables, one for each position in a text.

  Attributes:
    statistic: G, summed over the texts before the token.
    freedom: degrees of freedom.
    num_tokens: number of tokens.
    num_impossible: number of tokens that have probability 0; a single one is a fault.
  """

  statistic: np.ndarray
  freedom: np.ndarray
  num_tokens: np.ndarray
  num_impossible: int

  @property
  def p_values(self) -> np.ndarray:
    """The p-value of each position; 1 where only one token is possible."""
    if self.num_impossible:
      return np.zeros(len(self.statistic))
    return np.where(self.freedom > 0, stats.chi2.sf(self.statistic, self.freedom), 1.0)

  def detectable(self, level: float) -> float:
    """Return the total variation distance of the first token that is detected at `level`.

    It is the root mean square over the texts before the token.
    """
    if not self.freedom[0]:
      return math.inf
    critical = stats.chi2.isf(level, self.freedom[0])

    def missed(strength: float) -> float:
      return stats.ncx2.cdf(critical, self.freedom[0], strength) - (1 - POWER)

    # n sum (p' - p)^2 / p is at least n (2 TV)^2.
    return math.sqrt(optimize.brentq(missed, 1e-3, 1e5) / self.num_tokens[0]) / 2


def count_texts(
  start: Int[np.ndarray, " B"],
  texts: Int[np.ndarray, "B T"],
  probs: Float[np.ndarray, "R+1 R V"],
  eos_ids: Sequence[int] | np.ndarray = (EOS,),
) -> TextCounts:
  """Compare the tokens of texts after `start` with their distributions, up to EOS."""
  _, size, vocab_size = probs.shape
  before, last, prefix = np.full(len(start), -1), start % size, start.astype(np.int64)
  is_live, results, num_impossible = np.ones(len(start), bool), [], 0
  for token in texts.T:
    p_token = np.where(token < 0, 0.0, probs[before + 1, last, token])
    num_impossible += int((p_token[is_live] == 0).sum())
    prefixes, rows, which, counts = np.unique(prefix[is_live], True, True, True)
    is_tested = counts >= 2 * MIN_EXPECTED  # others have a single cell
    found = np.zeros((is_tested.sum(), vocab_size))
    tested = is_tested[which] & (token[is_live] >= 0)
    np.add.at(found, ((np.cumsum(is_tested) - 1)[which[tested]], token[is_live][tested]), 1)
    rows = np.flatnonzero(is_live)[rows[is_tested]]
    p = np.float64(probs[before[rows] + 1, last[rows]])
    statistics = [_statistic(*pair) for pair in zip(found, p / p.sum(axis=1, keepdims=True))]
    results.append((*np.sum([(0.0, 0), *statistics], axis=0), len(which)))
    before, last, prefix = last, token % size, prefix * vocab_size + token
    is_live &= ~np.isin(token, eos_ids)
  statistic, freedom, num_tokens = np.array(results).T
  return TextCounts(statistic, freedom.astype(int), num_tokens.astype(int), num_impossible)


def _statistic(found: np.ndarray, p: np.ndarray) -> tuple[float, int]:
  """Return G and its degrees of freedom; tokens that are expected rarely share a cell."""
  expected = p * found.sum()
  order = np.argsort(-expected)
  found, expected = found[order], expected[order]
  num_cells = max(1, int((expected >= MIN_EXPECTED).sum()))
  if expected[num_cells:].sum() < MIN_EXPECTED:  # then they share the last cell
    num_cells = max(0, num_cells - 1)
  cells = np.minimum(np.arange(len(p)), num_cells)
  found, expected = np.bincount(cells, found), np.bincount(cells, expected)
  return float(2 * special.rel_entr(found, expected).sum()), len(expected) - 1


def texts_of_round(
  decoder: Decoder, params: Params, state: DecodeState, probs: Table, rng: Key[Array, ""]
) -> tuple[Int[Array, "B T"], Any]:
  """Run a round, and continue the tokens that it emits by samples from `probs`.

  Returns:
    Texts of one token more than the depth of the tree, -1 in a row that emits nothing; and the
    state of the draft.
  """
  after = decoder.round(params, state)
  count, size = after.length - state.length, decoder.draft.tree.depth + 1
  texts = gather(after.tokens, state.length[:, None] + jnp.arange(size))
  texts = jnp.where(count[:, None] > 0, texts, -1)
  noise = jax.random.gumbel(rng, (size, len(count), probs.shape[-1]))
  before = jnp.concatenate([state.context.last_token[:, None], texts], axis=1) % probs.shape[1]
  for i in range(1, size):
    logits = jnp.log(probs[before[:, i - 1] + 1, before[:, i]]) + noise[i]
    texts = texts.at[:, i].set(jnp.where(i < count, texts[:, i], logits.argmax(axis=-1)))
    before = before.at[:, i + 1].set(texts[:, i] % probs.shape[1])
  return texts, after.draft_state


def _table_texts(
  decoder: Decoder, params: Params, prompt: Prompt, keys: Array, probs: Table, rng: Array
) -> Array:
  state = decoder.init(params, prompt, keys, decoder.draft.tree.depth + 1)
  return texts_of_round(decoder, params, state, probs, rng)[0]


_few_texts, _many_texts = quick_jit(_table_texts), long_jit(_table_texts)


def random_tables(seed: int) -> tuple[Table, Table]:
  """Return logits of a target and of a draft.

  By the text before, the draft is at another temperature, peaked, flat, unrelated, nearly or
  exactly equal, a one-hot, or filtered; or the target is filtered. Some tokens of the target tie.
  """
  rng = np.random.default_rng(seed)
  p, q = rng.normal(0, 1.2, (2, (V + 1) * V, V))
  p[::3, 2] = p[::3, 3] + 1e-6
  q *= 2
  kinds = rng.permutation(len(p)) % 9
  kinds[:V] = 1, 8, 0, 7, 8  # of first tokens, whose test is the most sensitive
  for i, kind in enumerate(kinds):
    if kind < 5:
      q[i] = p[i] * (0.7, 3.0, 0.0, 1.0, 1.0)[kind] + (kind == 3) * 5e-5 * q[i]
    elif kind == 5:
      q[i] = np.where(p[i] >= np.sort(p[i])[-2], p[i], -np.inf)
    elif kind == 6:
      q[i] = np.where(np.arange(V) == rng.integers(V), 0.0, -np.inf)
    elif kind == 7:  # the first and the last token, or others, are impossible
      q[i] = p[i]
      p[i, [(0, V - 1), (2, V - 1), (0, 3)][i % 3]] = -np.inf
  return tuple(jnp.float32(x.reshape(V + 1, V, V)) for x in (p, q))  # type: ignore[return-value]


def small_sampling(sampling: Sampling) -> Sampling:
  """Return a sampling method whose top-k is small enough to exclude some of V tokens."""
  return dataclasses.replace(sampling, top_k=min(sampling.top_k, V - 2))


def verifier_alone(
  verifier: Verifier, tree: AnyTree, seed: int, num_rounds: int | None = None
) -> TextCounts:
  """Run rounds of a verifier with proposals from tables, and test the tokens that they emit.

  By the first token, siblings are sampled with or without replacement, and some tokens are not
  proposed, as far as the verifier supports it. `num_rounds` defaults to 2^20, to 2^17 with filters
  or a dynamic tree, whose faults are larger, and to 2^12 at temperature 0.
  """
  sampling, is_dynamic = verifier.sampling, isinstance(tree, DynamicTree)
  if num_rounds is None:
    is_coarse = is_dynamic or sampling != Sampling(sampling.temperature)
    num_rounds = 2**12 if sampling.is_argmax else 2**17 if is_coarse else 2**20
  (p, q), starts = random_tables(seed), np.arange(V)
  is_short = verifier.allows_short_proposals & (starts >= 3)
  proposals = TableProposals(q, verifier.needs_independent_siblings | (starts % 2 == 1), is_short)
  if isinstance(tree, DynamicTree):
    shapes, rng = shapes_of(tree, V), np.random.default_rng(seed)
    # Siblings are different tokens: each node has an order of its children.
    orders = [rng.permuted(np.tile(starts, (tree.num_nodes, 1)), axis=1) for _ in starts]
    tokens = np.array([order[x.parents, x.ranks] for order, x in zip(orders, shapes)])
    tokens[is_short, -1] = -1
    parents = np.array([shape.parents for shape in shapes])
    proposals = proposals._replace(tokens=tokens, parents=parents)
  params = Params(p, jax.tree.map(jnp.asarray, proposals))
  decoder = Decoder(TableModel(), TableDraft(tree, sampling.is_argmax), verifier)
  probs, texts = target_distribution(p, sampling), []
  prompt = jnp.arange(min(ROWS, num_rounds))[:, None] % V
  run = _few_texts if num_rounds < ROWS else _many_texts
  for first in range(0, num_rounds, len(prompt)):
    keys, rng_after = row_keys(seed, first, len(prompt)), jax.random.key(seed + first + 1)
    texts.append(np.asarray(run(decoder, params, prompt, keys, probs, rng_after)))
  start = np.tile(np.asarray(prompt)[:, 0], len(texts))
  return count_texts(start, np.concatenate(texts), np.asarray(probs))


# The draft of a pair with its verifier.


@dataclasses.dataclass(frozen=True)
class KeepingDraft(WrappedDraft):
  """Wrapper of a draft that keeps the proposal of the last round in its state."""

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    proposal, draft_state = self.draft.propose(params, state[0], context, rng)
    return proposal, (draft_state, proposal)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return self.draft.observe(params, state[0], outcome), state[1]


def draft_with_verifier(
  decoder: Decoder, params: Params, prompt: Prompt, seed: int, num_rounds: int
) -> tuple[TextCounts, dict[str, Drift]]:
  """Run rounds of a decoder on tables that continue real texts, each text with many keys.

  Returns:
    Tests of the tokens that rounds emit, and the drifts of the scores of draft tokens under the q
    that the draft reports (`martingale`), which are missing if it reports none.
  """
  keys, depth = row_keys(seed, 0, len(prompt)), decoder.draft.tree.depth

  @quick_jit
  def begun(params: Params, num_rounds: int) -> DecodeState:
    state = decoder.init(params, prompt, keys, max_new_tokens=3 * (depth + 1))
    return lax.fori_loop(0, num_rounds, lambda _, state: decoder.round(params, state), state)

  for num_before in (2, 0):  # texts that last two rounds, if there are any
    state = begun(params, num_before)
    last = np.where(state.done, -1, np.asarray(state.context.last_token) % NUM_LAST)
    rows = np.unique(last, return_index=True)[1]
    if (rows := rows[last[rows] >= 0][:MAX_CONTEXTS]).size:
      break
  state = jax.tree.map(lambda x: x[rows], state)
  table = _table_near(decoder, params, state, seed)
  probs = target_distribution(table, decoder.verifier.sampling)

  model, params = decoder.target, Params(table, params.draft)
  target = TableModel(model.vocab_size, model.eos_id, state.hidden.shape[-1])
  decoder = dataclasses.replace(decoder, target=target, draft=KeepingDraft(decoder.draft))
  state = state._replace(draft_state=(state.draft_state, None))
  numbers = model.vocab_size * decoder.draft.tree.num_nodes * len(rows)
  copies = max(1, min(num_rounds // len(rows), 2**23 // numbers))
  starts, texts = np.asarray(state.context.last_token).repeat(copies), []
  drifts: dict[str, Drift] = {}
  for first in range(0, num_rounds, len(starts)):
    keys, rng = row_keys(seed + 1, first, len(starts)), jax.random.key(seed + first + 1)
    of_round, scores = jax.device_get(_draft_round(decoder, params, state, keys, probs, rng))
    texts.append(of_round)
    for name, (score, variance, bound) in scores.items():
      drift = Drift(float(score), float(variance), bound)
      drifts[name] = drifts[name].plus(drift) if name in drifts else drift
  starts, eos_ids = np.tile(starts, len(texts)), _eos_ids(decoder)
  return count_texts(starts, np.concatenate(texts), np.asarray(probs), eos_ids), drifts


def _eos_ids(decoder: Decoder) -> np.ndarray:
  return np.atleast_1d(decoder.target.eos_id if decoder.eos_id is None else decoder.eos_id)


def _table_near(decoder: Decoder, params: Params, state: DecodeState, seed: int) -> Table:
  """Return logits with which draft tokens are accepted now and then.

  After a committed text, half of the probability is that of the draft. After every second text,
  and after draft tokens, only tokens that the draft may propose, and EOS, are possible.
  """
  copies, vocab_size = 8, decoder.target.vocab_size
  many, keys = repeat_rows(state, copies), row_keys(seed + 2, 0, copies * len(state.length))
  propose = quick_jit(decoder.draft.propose)
  proposal = jax.device_get(propose(params.draft, many.draft_state, many.context, keys)[0])
  tokens = proposal.tokens.reshape(len(state.length), -1)
  rng, eos_ids = np.random.default_rng(seed), _eos_ids(decoder)
  table = np.full((NUM_LAST + 1, NUM_LAST, vocab_size), -np.inf, np.float32)
  proposed = np.union1d(tokens[tokens >= 0], eos_ids).astype(int)
  table[1:, :, proposed] = rng.normal(0, 1, (NUM_LAST, NUM_LAST, len(proposed)))
  for i, last in enumerate(np.asarray(state.context.last_token) % NUM_LAST):
    is_known = np.isin(np.arange(vocab_size), [*tokens[i], *eos_ids])
    is_first = np.arange(vocab_size) == tokens[i, 0]
    q = is_first if proposal.q is None else proposal.q[i * copies, 0]
    near = 0.5 * q + 0.5 * is_known / is_known.sum()
    table[0, last] = np.log(np.maximum(near, 1e-9)) + rng.normal(0, 0.5, vocab_size)
    if i % 2 == 0:
      table[0, last, near < 1e-6] = -np.inf
  return jnp.asarray(table * (decoder.verifier.sampling.temperature or 1.0))


@quick_jit
def _draft_round(
  decoder: Decoder, params: Params, state: DecodeState, keys: Array, probs: Table, rng: Array
) -> tuple[Array, dict[str, tuple[Array, Array, float]]]:
  """Run a round from each text with its share of the keys; return texts, and sums of scores."""
  many = repeat_rows(state, len(keys) // len(state.length))._replace(rng=keys)
  texts, (_, proposal) = texts_of_round(decoder, params, many, probs, rng)
  if proposal.q is None:
    return texts, {}
  scores, tree = token_scores(proposal.q, jnp.maximum(proposal.tokens, 0)), decoder.draft.tree
  sums = {
    kind: (getattr(scores, score).sum(), getattr(scores, variance).sum(), bound)
    for kind, (score, variance, bound) in TOKEN_SCORES.items()
  }
  if isinstance(tree, Tree) and tree.depth > 1:  # each draft token with the one before it
    later = np.flatnonzero(tree.parents)
    place = scores.place[:, np.array(tree.parents)[later] - 1]
    product, variance = scores.place[:, later] * place, scores.spread[:, later] * place**2
    sums["place of two tokens"] = product.sum(), variance.sum(), 0.25
  return texts, sums
