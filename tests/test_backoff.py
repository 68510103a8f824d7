"""Compare back-off n-grams with a plain count of successors, and test drafts with a fallback."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.drafts.backoff import BackoffDraft, backoff_ngrams, fit_backoff
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.drafts.several import FallbackDraft
from specdec_jax.drafts.uniform import UniformDraft
from specdec_jax.errors import InputError

EOS, SLOTS = 1, 24
RNG = np.random.default_rng(0)
ROWS = [[*RNG.integers(2, 7, RNG.integers(3, 15)).tolist(), EOS] for _ in range(40)]


def by_hand(rows, text, order, rank):
  """Return the most frequent successors of a text by counting, longest context first, or 0."""
  for length in reversed(range(order)):
    context = text[len(text) - length :]
    if len(text) < length:
      continue
    followed = Counter(
      row[at]
      for row in ([0, *row] for row in rows)
      for at in range(max(1, length), len(row))
      if row[at - length : at] == context
    )
    if followed:
      ranked = sorted(followed, key=lambda token: (-followed[token], token))
      return ranked[rank] if rank < min(len(ranked), 8) else 0
  return 0


def written(texts) -> Context:
  """Return a context with empty prompts and these committed tokens."""
  fill = jnp.array([[*text, *[9] * (SLOTS - len(text))] for text in texts], jnp.int32)
  return Context(
    jnp.zeros((len(texts), 4), jnp.int32), fill, jnp.array([*map(len, texts)]), None, None
  )


def propose(draft, params, texts):
  context = written(texts)
  state = draft.init(params, context, jnp.zeros((len(texts), 1, 0)))
  keys = jax.random.split(jax.random.key(0), len(texts))
  return draft.propose(params, state, context, keys)[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("tree", [chain(3), Tree((0, 0, 0, 1, 1, 2, 4))], ids=["chain", "tree"])
def test_draft_tokens_are_the_most_frequent_successors_of_the_longest_context(order, tree):
  texts = [[0, *row[:length]] for row, length in zip(ROWS, (0, 1, 2, 3, 5, 4))]
  texts += [[0, 2, 8, 8], [0, 8, 8, 8, 3]]  # ids that no row contains
  proposal = propose(BackoffDraft(tree, order), fit_backoff(ROWS, order), texts)
  assert proposal.q is None
  for text, draft_tokens in zip(texts, np.asarray(proposal.tokens).tolist()):
    paths = [text]
    for parent, rank, draft_token in zip(tree.parents, tree.ranks.tolist(), draft_tokens):
      assert draft_token == by_hand(ROWS, paths[parent], order, rank)
      paths.append([*paths[parent], draft_token])


def test_missing_successors_leave_later_siblings_unproposed():
  params = fit_backoff([[5, EOS], [6, EOS], [5, EOS]], 2, num_successors=1)
  proposal = propose(BackoffDraft(branching(2), 2), params, [[0], [0, 5]])
  assert proposal.tokens.tolist() == [[5, 0], [EOS, 0]]


def test_ngrams_are_counted_from_a_file(tmp_path):
  words = tiny_pair.pair().vocabulary
  (tmp_path / "out.txt").write_text("".join(f"{text}\n" for text in tiny_pair.SENTENCES))
  drafter = backoff_ngrams(tiny.loaded(words), str(tmp_path / "out.txt"), order=3)
  text = [words.start_id, *words.encode(tiny_pair.SENTENCES[0])]
  draft = drafter.build(Sampling(), chain(3))
  proposal = propose(draft, drafter.params, [text[:5]])
  rows = [*map(words.encode, tiny_pair.SENTENCES)]
  assert drafter.name == "3-gram" and proposal.tokens[0, 0] == by_hand(rows, text[:5], 3, 0)


@pytest.mark.parametrize(
  "rows, order, sentence",
  [(ROWS, 0, "order is 0"), (ROWS, 9, "order is 9")],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_files_and_sizes_raise(rows, order, sentence):
  with pytest.raises(InputError, match=sentence):
    fit_backoff(rows, order)


def test_fallback_uses_the_first_draft_with_a_proposal():
  """The last token of the first text is new, so n-grams have a proposal but prompt lookup has
  none."""
  drafts = PromptLookupDraft(7, chain(2), 2), BackoffDraft(chain(2), 2)
  params = (), fit_backoff(ROWS, 2)
  texts = [[0, 2, 3], [0, 4, 5, 6, 4]]
  tokens = propose(FallbackDraft(drafts), params, texts).tokens.tolist()
  alone = propose(drafts[1], params[1], texts).tokens.tolist()
  assert tokens == [alone[0], [5, 6]] and alone[1] != [5, 6]


def test_fallback_tries_its_drafts_in_order():
  """Try three scripted drafts, where 0 is no proposal; without any, the last draft is used."""
  drafts = (tiny.ScriptedDraft(chain(1)),) * 3
  first_tokens = jnp.array([[5, 6, 7], [0, 6, 7], [0, 0, 7], [5, 0, 7], [0, 6, 0], [0, 0, 0]])
  params = tuple(jnp.repeat(first_tokens[:, i : i + 1], SLOTS, axis=1) for i in range(3))
  tokens = propose(FallbackDraft(drafts), params, [[0, 2]] * 6).tokens
  assert tokens[:, 0].tolist() == [5, 6, 7, 5, 6, 0]


def test_drafts_that_cannot_be_combined_raise():
  with pytest.raises(InputError, match="need equal trees"):
    FallbackDraft((PromptLookupDraft(7, chain(2)), BackoffDraft(chain(3), 2)))
  drawing = FallbackDraft((PromptLookupDraft(7, chain(2)), UniformDraft(7, chain(2))))
  with pytest.raises(InputError, match="must select"):
    propose(drawing, ((), ()), [[0, 2]])


def test_name_of_a_uniform_draft():
  proposal = propose(UniformDraft(7, branching(3)), (), [[0, 2]] * 400)
  assert (proposal.q == np.float32(1 / 7)).all() and proposal.q.shape == (400, 3, 7)
  counts = np.bincount(np.asarray(proposal.tokens).ravel(), minlength=7)
  assert abs(counts - 1200 / 7).max() < 5 * np.sqrt(1200 / 7)  # five standard deviations
