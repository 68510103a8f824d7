"""Compare retrieval with a plain search of all positions, and test its datastore on disk."""

from collections import Counter

import jax
import numpy as np
import pytest
import tiny
import tiny_pair
from test_backoff import EOS, ROWS, propose, written

from specdec_jax.contrib import retrieval
from specdec_jax.contrib.retrieval import RetrievalDraft, build_datastore, with_texts
from specdec_jax.core.trees import DynamicTree, Tree, chain
from specdec_jax.errors import InputError

pytestmark = pytest.mark.slow

STORE = [token for row in ROWS for token in (0, *row)]
TEXTS = [[0, *row[:length]] for row, length in zip(ROWS, (0, 1, 2, 3, 5, 4))]
TEXTS += [[0, 2, 8, 8], [0, 8, 8, 8, 3]]  # ids that no row contains


def longest_match(text, max_context) -> tuple[int, list[int]]:
  """Return the length of the longest suffix that occurs, and where its occurrences end."""
  for n in range(min(max_context, len(text)), 0, -1):
    ends = [at + n for at in range(len(STORE) - n + 1) if STORE[at : at + n] == text[-n:]]
    if ends:
      return n, ends
  return 0, []


def followed(text, max_context, depth) -> list[tuple[int, ...]]:
  """Return all continuations of the longest suffix that occurs in the text, by a plain search."""
  return [tuple(STORE[end : end + depth]) for end in longest_match(text, max_context)[1]]


def counted(text, max_context, depth) -> Counter:
  """Return how often each path of the trie occurs."""
  runs = followed(text, max_context, depth)
  return Counter(run[: d + 1] for run in runs for d in range(len(run)))


@pytest.mark.parametrize("tree", [chain(4), Tree((0, 0, 0, 1, 1, 2, 4))], ids=["chain", "tree"])
def test_most_frequent_children_of_each_node_are_proposed(tree):
  draft_tokens = propose(RetrievalDraft(tree, 3, 300), build_datastore(ROWS), TEXTS).tokens.tolist()
  for text, row in zip(TEXTS, draft_tokens):
    counts, paths = counted(text, 3, tree.depth), [()]
    for parent, rank, draft_token in zip(tree.parents, tree.ranks.tolist(), row):
      above = paths[parent]
      most = sorted((-n, path[-1]) for path, n in counts.items() if path[:-1] == above)
      assert draft_token == (most[rank][1] if rank < len(most) else 0)
      paths.append((*above, draft_token))
  assert draft_tokens[6] == [0] * tree.num_draft_tokens  # a context that does not occur


@pytest.mark.parametrize("num_draft_tokens", [5, 30])
def test_dynamic_tree_has_the_most_frequent_nodes(num_draft_tokens):
  draft = RetrievalDraft(DynamicTree(num_draft_tokens, 3), 3, 300)
  proposal = propose(draft, build_datastore(ROWS), TEXTS)
  parents = np.asarray(proposal.tree.parents).tolist()
  for text, draft_tokens, above in zip(TEXTS, proposal.tokens.tolist(), parents):
    counts, paths = counted(text, 3, 3), [()]
    for parent, draft_token in zip(above, draft_tokens):
      paths.append((*paths[parent], draft_token))
    made = [path for path in paths[1:] if path[-1] >= 0]
    assert len(set(made)) == len(made) == min(num_draft_tokens, len(counts))
    most = sorted(counts.values(), reverse=True)[: len(made)]
    assert sorted((counts[path] for path in made), reverse=True) == most


@pytest.mark.parametrize("tokens_per_match", [1, 2])
def test_longer_matches_are_continued_for_longer(tokens_per_match):
  limited, unlimited = (
    propose(RetrievalDraft(chain(5), 3, 300, limit), build_datastore(ROWS), TEXTS).tokens.tolist()
    for limit in (tokens_per_match, None)
  )
  lengths = [longest_match(text, 3)[0] for text in TEXTS]
  assert set(lengths) == {0, 1, 2, 3}
  for n, got, tokens in zip(lengths, limited, unlimited):
    proposed = min(5, tokens_per_match * n)
    assert got == tokens[:proposed] + [0] * (5 - proposed)


@pytest.mark.parametrize("tree", [chain(4), DynamicTree(30, 3)], ids=["chain", "dynamic"])
def test_room_for_more_texts_does_not_change_the_proposals(tree):
  draft, room = RetrievalDraft(tree, 3, 300), len(STORE) + 77
  exact, roomy = (
    propose(draft, build_datastore(ROWS, capacity=capacity), TEXTS) for capacity in (None, room)
  )
  assert np.asarray(exact.tokens > 0).any()
  for one, other in zip(jax.tree.leaves(exact), jax.tree.leaves(roomy), strict=True):
    np.testing.assert_array_equal(one, other)
  empty = propose(draft, build_datastore([], capacity=room), TEXTS)
  assert (np.asarray(empty.tokens) <= 0).all()


@pytest.mark.parametrize("room", [len(STORE) + 77, len(STORE), len(STORE) - 20])
def test_texts_are_added_and_the_first_ones_dropped(room):
  store = build_datastore([], capacity=room)
  for first in range(0, len(ROWS), 7):
    store = with_texts(store, ROWS[first : first + 7])
  kept = STORE[-room:]
  assert store.tokens.tolist() == kept + [-1] * (room - len(kept) + retrieval.REACH)
  places = store.places.tolist()
  assert sorted(places) == [*range(room)]
  suffixes = [store.tokens[place : place + retrieval.REACH].tolist() for place in places]
  assert suffixes == sorted(suffixes)


def test_matches_beyond_the_limit_are_sampled_evenly():
  """Token 5 is followed by 2 at 90 positions and by 3 at 10 positions, of which ten are read."""
  store = build_datastore([[5, 2, EOS]] * 90 + [[5, 3, EOS]] * 10)
  trie = RetrievalDraft(chain(1), 1, 10)._trie(store, written([[0, 5]]))
  assert trie.counts[0, :, 0].tolist() == [9, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_datastore_is_built_once(cache, tmp_path, monkeypatch):
  words, built = tiny_pair.pair().vocabulary, []

  def build(*args):
    return built.append(build_datastore(*args)) or built[-1]

  monkeypatch.setattr(retrieval, "build_datastore", build)
  text = tmp_path / "out.txt"

  def look(lines: list[str]):
    text.write_text("".join(f"{line}\n" for line in lines))
    return retrieval.retrieval(tiny.loaded(words), str(text)).params

  few, all_ = tiny_pair.SENTENCES[:2], tiny_pair.SENTENCES
  made = [look(few), look(few), look(all_), look(few)]
  assert len(built) == 2
  np.testing.assert_array_equal(made[3].places, made[0].places)
  np.testing.assert_array_equal(made[3].tokens, made[0].tokens)
  for file in cache.rglob("*.npz"):
    file.write_bytes(file.read_bytes()[:100])
  look(few)
  assert len(built) == 3
  for change in (lambda x: x.astype(np.int64), lambda x: x[:-1], lambda x: x[None]):
    for file in cache.rglob("*.npz"):  # as another version may have written
      if file.stat().st_size == 100:
        continue
      arrays = dict(np.load(file))
      np.savez(file, **arrays | {"tokens": change(arrays["tokens"])})
    look(few)
  assert len(built) == 6


@pytest.mark.parametrize(
  "make, sentence",
  [
    (lambda: build_datastore([]), "hold no tokens"),
    (lambda: build_datastore([[5, EOS]], capacity=0), "capacity is 0"),
    (lambda: RetrievalDraft(chain(2), tokens_per_match=0), "tokens_per_match is 0"),
    (lambda: RetrievalDraft(chain(25)), "may be 32 together"),
    (lambda: RetrievalDraft(Tree((0,) * 9), num_matches=8), "needs 9 continuations"),
    (lambda: RetrievalDraft(DynamicTree(40, 2), num_matches=19), "needs 20 continuations"),
    (lambda: RetrievalDraft(chain(2), max_context=0), "max_context is 0"),
  ],
)
def test_invalid_datastores_raise(make, sentence):
  with pytest.raises(InputError, match=sentence):
    make()
