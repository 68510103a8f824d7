"""Beam search finds what a search written out text by text finds, and in fewer passes the same."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax import records
from specdec_jax.beam_search import (
  BeamDraft,
  ModelBeamDraft,
  TreeBeamDraft,
  beam_search,
  entries,
  forest,
  search,
  speculative_beam_search,
  step,
)
from specdec_jax.commands import bench_beams as commands
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.heads import init_params, speculator_config
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import InputError
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.pairs.speculators import head_factory
from specdec_jax.partitioning import PartitionedModel, make_mesh

LIMIT, EOS = 9, 1
T5 = tiny.config(layers=1)
GPT = tiny.gpt_config(layers=1, num_positions=128)


@dataclasses.dataclass(frozen=True)
class Case:
  """A target, a draft for it, parameters of both, and prompts."""

  target: object
  draft: object
  params: object
  draft_params: object
  prompt: np.ndarray


@functools.cache
def t5() -> Case:
  params = tiny.params(T5, 3, peak=1.0)
  return Case(T5Model(T5), T5Model(T5), params, tiny.near(params, 1, 0.2), tiny.sources(T5, 0, 6))


@functools.cache
def gpt() -> Case:
  params = tiny.params(GPT, 3, peak=1.0)
  prompt = tiny.prompts(GPT, 0, [1, 2, 3, 4, 5, 6])
  return Case(GPTModel(GPT), GPTModel(GPT), params, tiny.near(params, 1, 0.2), prompt)


FAMILIES = {"t5": t5, "gpt": gpt}


def plain(case: Case, width: int, rows=slice(None), **how):
  how = dict(max_new_tokens=LIMIT, eos_id=EOS) | how
  return beam_search(case.target, case.params, case.prompt[rows], width=width, **how)


def same(ours, theirs) -> None:
  """Fails unless texts, their order, lengths and scores are equal."""
  np.testing.assert_array_equal(ours.tokens, theirs.tokens)
  np.testing.assert_array_equal(ours.lengths, theirs.lengths)
  np.testing.assert_allclose(ours.scores, theirs.scores, rtol=0, atol=1e-5)


@functools.partial(jax.jit, static_argnames="model")
def chances(model, params, prompt, texts):
  """Log-probabilities [w, LIMIT, V] of what follows each token of texts [w, LIMIT] and, first, the
  prompt [P]; by one pass over a chain."""
  each = jnp.repeat(prompt[None], len(texts), axis=0)
  first, length = model.prompt_tokens(each)
  _, cache = model.prefill(params, each, first.shape[1] + LIMIT)
  newest = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  logits, _, _ = model.extend(params, cache, jnp.concatenate([newest, texts[:, :-1]], axis=1))
  return jax.nn.log_softmax(logits)


def written_out(model, params, prompt, width: int, length_penalty: float = 0.6):
  """Texts and scores of one prompt, text by text: t5x's rules, of lists."""
  committed = int(model.prompt_tokens(prompt[None])[1][0])
  penalty = lambda length: np.float32(((5 + length) / 6) ** length_penalty)
  live, finished = [(np.float32(0), ())], []  # the best last
  best = lambda all_, count: sorted(all_, key=lambda each: -each[0])[:count]  # of equals the first
  for at in range(LIMIT):
    texts = np.zeros((width, LIMIT), np.int32)
    for row, (_, text) in zip(texts, live):
      row[:at] = text
    logs = np.asarray(chances(model, params, prompt, texts))[:, at]
    more = [
      (total + logs[row, token], (*text, token))
      for row, (total, text) in enumerate(live)
      for token in range(logs.shape[1])
    ]
    more = best(more, 2 * width)
    finished += [(s / penalty(committed + at), text) for s, text in more if text[-1] == EOS]
    finished = best(finished, width)[::-1]
    live = [each for each in more if each[1][-1] != EOS][:width][::-1]
    bound = live[-1][0] / penalty(committed + LIMIT)
    if len(finished) == width and finished[0][0] > bound:
      break
  return (finished or live)[::-1]


@pytest.mark.parametrize("family, width", [("t5", 1), ("t5", 3), ("t5", 8), ("gpt", 4)])
def test_found_is_what_a_search_written_out_finds(family, width):
  case = FAMILIES[family]()
  found = plain(case, width)
  ended = 0
  for row, prompt in enumerate(case.prompt):
    want = written_out(case.target, case.params, prompt, width)
    for place, (score, text) in enumerate(want):
      length = found.lengths[row, place]
      assert tuple(found.tokens[row, place, :length].tolist()) == text
      assert found.scores[row, place] == pytest.approx(score, abs=1e-5)
    assert not np.asarray(found.lengths)[row, len(want) :].any()
    ended += sum(text[-1] == EOS for _, text in want)
  assert ended >= 3, "too few texts end to tell anything"


def guessing(model, gamma: int) -> ModelDraft:
  return ModelDraft(model, Sampling(temperature=0.0), chain(gamma))


def on_source(case: Case, kind: str, gamma: int) -> tuple[ModelDraft, object]:
  """A decoder that has learned nothing, on the target's encoder."""
  sizes = dict(gamma=2, emb_dim=32, mlp_dim=16, num_layers=1)
  config = speculator_config(case.target.config, kind, **sizes)
  own = init_params(config, jax.random.key(3))
  made = head_factory(kind, config, own, tiny.loaded(None, case.target, case.params))
  return made.build(Sampling(temperature=0.0), chain(gamma)), made.params


def on_states(case: Case) -> tuple[BeamDraft, object]:
  """A layer that has learned nothing, which reads the target's states and its source."""
  shape = case.target.config
  config = speculator_config(shape, "eagle", gamma=2, emb_dim=8, mlp_dim=16, num_layers=1)
  own = init_params(config, jax.random.key(3))
  made = head_factory("eagle", config, own, tiny.loaded(None, case.target, case.params))
  return TreeBeamDraft(made.build(Sampling(temperature=0.0), DynamicTree(4, 2))), made.params


DRAFTS = {
  "as wide": lambda case: (ModelBeamDraft(guessing(case.draft, 2), 3), case.draft_params),
  "twice as wide": lambda case: (ModelBeamDraft(guessing(case.draft, 3), 6, 99), case.draft_params),
  "narrow passes": lambda case: (ModelBeamDraft(guessing(case.draft, 3), 6, 4), case.draft_params),
  "itself": lambda case: (ModelBeamDraft(guessing(case.target, 3), 3, 99), case.params),
  "on the target's states": lambda case: on_states(case),
  "copies": lambda case: (TreeBeamDraft(PromptLookupDraft(16, branching(2, 1), 2)), ()),
}


def speculate(case: Case, draft: tuple[BeamDraft, object], width: int = 3, rows=slice(None)):
  make, draft_params = draft
  models, params = (case.target, make), (case.params, draft_params)
  how = dict(width=width, max_new_tokens=LIMIT, eos_id=EOS)
  return speculative_beam_search(*models, *params, case.prompt[rows], **how)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_speculation_finds_the_same(family, draft):
  case = FAMILIES[family]()
  found, ours = plain(case, 3), speculate(case, DRAFTS[draft](case))
  same(ours, found)
  steps = np.asarray(ours.steps)
  np.testing.assert_array_equal(steps.sum(axis=0), np.asarray(found.steps).sum(axis=0))
  assert ours.num_rounds <= found.num_rounds
  if draft == "itself":  # each pass makes all four, as far as the row goes
    made_before = 4 * np.arange(len(steps))[:, None]
    np.testing.assert_array_equal(steps, np.clip(steps.sum(axis=0) - made_before, 0, 4))
  if draft == "twice as wide":
    assert 1.3 < steps[steps > 0].mean() < 4, "the draft is no test of what is refused"


@pytest.mark.parametrize("kind", ["shared_encoder", "conditioned"])
def test_a_decoder_on_the_targets_encoder_searches_too(kind):
  draft, params = on_source(t5(), kind, 2)
  same(speculate(t5(), (ModelBeamDraft(draft, 4), params)), plain(t5(), 3))


def test_conditioning_follows_its_beam():
  """A single beam has the draft tokens of the chain, round after round, when some are accepted."""
  case, (draft, params) = t5(), on_source(t5(), "conditioned", 3)
  never, guesses, asked = 0, [], []

  class Recorded(ModelBeamDraft):
    def propose(self, params, state, context):
      forest, state = super().propose(params, state, context)
      asked.append(np.asarray(forest.tokens))
      return forest, state

  def says(*text: int):
    """The target, sure of this text."""

    def change(model, params, cache, tokens, tree, first):
      logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
      sure = 1e3 * jax.nn.one_hot(jnp.array(text), T5.vocab_size)
      return logits.at[:, : len(text)].add(sure), hidden, cache

    return tiny.ChangedModel(case.target, change)

  keys, verifier = jax.random.split(jax.random.key(0), 1), TokenVerifier(Sampling(temperature=0.0))
  models, prompt = (case.params, params), case.prompt[:1]
  chains = tiny.start(case.target, draft, *models, prompt, LIMIT)._replace(rng=keys)
  beams = search.start(case.target, Recorded(draft, 1, 4), *models, prompt, 1, LIMIT)
  for kept, correction in ((0, 5), (2, 8), (3, 3), (0, 10)):
    guess = draft.propose(params, chains.draft_state, chains.context, keys)[0].tokens
    guesses.append(np.asarray(guess))
    target = says(*guess[0, :kept].tolist(), correction)
    chains = Decoder(target, draft, verifier, never).round(Params(*models), chains)
    beams = search.one_round(target, Recorded(draft, 1, 4), *models, 0.6, never, beams)
    assert int(chains.num_rounds) == len(asked) and beams.live.beams.length == chains.length
  np.testing.assert_array_equal(guesses, asked)
  assert not (np.array(guesses) == never).any() and len({tuple(each[0]) for each in guesses}) > 2


def test_the_target_reads_nothing_twice(monkeypatch):
  """Of a text that was read, whether guessed or live, no later pass reads the last token again."""
  case, (draft, draft_params) = t5(), DRAFTS["twice as wide"](t5())
  models, traced = (case.target, draft, case.params, draft_params), []

  def recorded(context, trees, *how):
    read = forest.of_round(context, trees, *how)
    kept = context.kept.tokens.shape[1]
    traced.append((context.tokens, context.length, context.known, trees, read.entries - kept))
    return read

  monkeypatch.setattr(search, "of_round", recorded)
  a_round = jax.jit(lambda s: (search.one_round(*models, 0.6, EOS, s), s.done, traced.pop()))
  state, read, ahead = search.start(*models, case.prompt, 3, LIMIT), [[] for _ in case.prompt], 0
  for at in range(5):
    state, done, (tokens, length, known, trees, entries) = a_round(state)
    for row in np.flatnonzero(~done):
      nodes = [tuple(text[: length[row]].tolist()) for text in tokens[row]]
      for token, parent in zip(trees.tokens[row].tolist(), trees.parents[row].tolist()):
        nodes.append((*nodes[parent], token))
      new = [text for text, entry in zip(nodes, entries[row]) if entry >= 0]
      read[row] += new if at else set(new)  # all beams begin as one text
      ahead += int((known[row] >= 0).sum())
  for texts in read:
    assert len(texts) == len(set(texts))
  assert ahead > 9, "too little was read ahead to tell anything"


def test_rows_depend_on_no_neighbour():
  case, draft = t5(), DRAFTS["as wide"](t5())
  whole, some = speculate(case, draft), speculate(case, draft, rows=[4, 2])
  np.testing.assert_array_equal(np.asarray(whole.tokens)[[4, 2]], some.tokens)
  rounds = int(some.num_rounds)
  np.testing.assert_array_equal(np.asarray(whole.steps)[:rounds, [4, 2]], some.steps[:rounds])


def test_a_beam_is_wider_than_a_vocabulary_only_in_error():
  for call, said in (
    (lambda: plain(t5(), 9), "more than the vocabulary's 16"),
    (lambda: plain(t5(), 0), "beams is 0"),
    (lambda: plain(t5(), 2, max_new_tokens=0), "max_new_tokens is 0"),
    (
      lambda: speculate(t5(), (ModelBeamDraft(guessing(t5().draft, 2), 2), t5().draft_params)),
      "2 beams",
    ),
    (
      lambda: speculate(t5(), (ModelBeamDraft(guessing(t5().draft, 2), 3, 2), t5().draft_params)),
      "A pass reads 2 nodes, fewer than the search has beams",
    ),
    (
      lambda: speculate(
        t5(), (TreeBeamDraft(ModelDraft(t5().draft, Sampling(), chain(2))), t5().draft_params)
      ),
      "ModelDraft keeps a state",
    ),
  ):
    with pytest.raises(InputError, match=said):
      call()


def test_the_best_texts_come_first_and_missing_ones_are_said():
  """One of two ended, none, both: where one did, a live text does not take the other's place."""
  beams = step.Beams(
    tokens=jnp.array([[[3], [4]]] * 3),
    log_probs=jnp.array([[-4.0, -3.0]] * 3),
    finished_tokens=jnp.array([[[0], [5]], [[0], [0]], [[6], [5]]]),
    scores=jnp.array([[step.NONE, -1.0], [step.NONE, step.NONE], [-2.0, -1.0]]),
    finished=jnp.array([[False, True], [False, False], [True, True]]),
    length=None,
  )
  texts, scores, there = step.best_first(beams)
  assert there.tolist() == [[True, False], [True, True], [True, True]]
  assert texts[..., 0].tolist() == [[5, 0], [4, 3], [5, 6]]
  assert scores.tolist() == [[-1, step.NONE], [-3, -4], [-1, -2]]


def test_guesses_of_a_tree_follow_their_own_beam():
  newest, two = jnp.array([[2, 3]]), jnp.zeros((1, 2, 1))
  none = dict.fromkeys(forest.BeamContext._fields)
  context = forest.BeamContext(**none)._replace(
    prompt=jnp.ones((1, 1), int), tokens=newest[..., None], length=jnp.array([1]), newest=newest
  )
  kept = entries.nothing(1, 0, 2, jnp.zeros((1, 1)))
  context = context._replace(target_cache=(), hidden=two, kept=kept, known=jnp.array([[-1, -1]]))
  guesses, _ = TreeBeamDraft(NullDraft(Tree((0, 0, 1)))).propose((), (), context)
  assert guesses.parents.tolist() == [[0, 0, 2, 1, 1, 5]]  # 0 and 1 are the newest tokens


def test_a_pass_may_read_as_many_nodes_as_the_search_has_beams():
  assert ModelBeamDraft(guessing(t5().draft, 2), 3, 3).num_nodes(3) == 3


def test_equally_likely_texts_come_in_t5xs_order():
  """Of a model to which all tokens are alike: of beams the first, of tokens the smallest."""
  flat = jax.tree.map(jnp.zeros_like, t5().params)
  case = dataclasses.replace(t5(), params=flat, draft_params=flat, prompt=t5().prompt[:1])
  found = plain(case, 3)
  for place, (score, text) in enumerate(written_out(case.target, flat, case.prompt[0], 3)):
    assert tuple(found.tokens[0, place, : len(text)].tolist()) == text
    assert found.scores[0, place] == pytest.approx(score, abs=1e-5)
  same(speculate(case, DRAFTS["twice as wide"](case)), found)


def test_of_a_model_gone_wrong_the_step_is_told():
  def broken(model, params, cache, tokens, tree, first):
    logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
    late = jnp.where(tree.positions[..., None] >= 2, jnp.nan, 0)
    return logits + late.at[1:].set(0), hidden, cache

  case = dataclasses.replace(t5(), target=tiny.ChangedModel(t5().target, broken))
  found = plain(case, 2)
  np.testing.assert_array_equal(found.not_finite, [2, -1, -1, -1, -1, -1])
  np.testing.assert_array_equal(np.asarray(found.tokens)[1:], plain(t5(), 2).tokens[1:])


def test_over_a_mesh_the_same():
  case = t5()
  over = dataclasses.replace(case, target=PartitionedModel(case.target, make_mesh()))
  same(plain(over, 3), plain(case, 3))


def test_a_search_ends_at_the_limit_or_when_no_live_text_can_become_better():
  """t5x's condition: strictly worse than the worst finished text, if there are as many as beams."""
  beams = step.Beams(
    tokens=None,
    log_probs=jnp.array([[-9.0, -2.0], [-9.0, -2.1], [-9.0, -2.1], [-9.0, -1.0]]),
    finished_tokens=None,
    scores=jnp.array([[-2.0, -1.0], [-2.0, -1.0], [step.NONE, -1.0], [-2.0, -1.0]]),
    finished=jnp.array([[True, True], [True, True], [False, True], [True, True]]),
    length=jnp.array([4, 4, 4, 10]),
  )
  limit = jnp.full(4, 10)
  assert step.ended(beams, limit, 0.0).tolist() == [False, True, False, True]
  # Scores at the limit are divided by 15 / 6, at the length now by 9 / 6: -1.2 and -2.
  longer = beams._replace(log_probs=beams.log_probs - 1.0)
  assert step.ended(longer, limit, 1.0).tolist() == [False, False, False, True]


def test_a_pass_reads_what_was_guessed_and_is_not_read_yet():
  """Two beams; of their guesses one was not made, one is an entry already, one has no room."""
  kept = entries.nothing(1, 1, 2, jnp.zeros((1, 1)))
  slots = jnp.zeros((1, 2, 9), bool)
  newest, one = jnp.array([[2, 3]]), jnp.array([4])
  text = dict(prompt=None, tokens=None, length=one, log_probs=None, newest=newest, seen=slots)
  before = dict(before=None, seen_before=None, slot=one, places=jnp.zeros((1, 9), int))
  state = dict(target_cache=None, hidden=None, kept=kept, known=jnp.array([[-1, -1]]), eos_id=EOS)
  forest_ = forest.Forest(
    tokens=jnp.array([[5, -1, 6, 7, 8]]),
    parents=jnp.array([[0, 0, 1, 1, 2]]),
    known=jnp.array([[-1, -1, 0, -1, -1]]),
  )
  context = forest.BeamContext(**text, **before, **state)
  read = jax.jit(lambda: forest.of_round(context, forest_, 2, 4))()
  assert read.nodes.tolist() == [[0, 1, 2, 5]] and read.tokens.tolist() == [[2, 3, 5, 7]]
  assert read.entries[0, [0, 1, 2, 4, 5]].tolist() == [1, 2, 3, 0, 4]
  assert (read.entries[0, [3, 6]] < 0).all()
  assert read.parents.tolist() == [[-1, -1, 1, 2]]
  assert read.placed.positions.tolist() == [[3, 3, 4, 4]]  # the last committed tokens are at 3


def test_what_is_no_entry_has_no_child_and_no_sum_and_is_not_kept():
  """Two roots, 0 and 2; entry 1 follows 0, entry 3 follows 1. -1 is no entry, and not the last."""
  some = entries.Entries(
    tokens=jnp.array([[5, 7, 5, 9]]),
    parents=jnp.array([[-1, 0, -1, 1]]),
    continuations=jnp.array([[[7, 8], [9, 6], [4, 3], [2, 7]]]),
    sums=jnp.array([[[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0], [-7.0, -8.0]]]),
    hidden=jnp.zeros((1, 4, 1)),
  )
  parents, tokens = jnp.array([[-1, -1, 0, 0, 1, 3]]), jnp.array([[5, 7, 7, 5, 9, 7]])
  assert entries.child(some, parents, tokens).tolist() == [[-1, -1, 1, -1, 3, -1]]
  sums = entries.sum_at(some, parents, tokens)
  assert sums.tolist() == [[step.NONE, step.NONE, -1, step.NONE, -3, -8]]
  keep = jax.jit(entries.keep, static_argnames=("count", "depth"))
  for live, count, kept, numbers in (
    ([0, -1], 4, [0, 1, 3], [0, -1]),  # what follows entry 0, not the other root
    ([1, 2], 4, [1, 2, 3], [0, 1]),
    ([0, 3], 2, [0, 1], [0, -1]),  # there is no room for entry 3
    ([-1, -1], 4, [], [-1, -1]),
  ):
    ours, known, were = keep(some, jnp.array([live]), count, depth=2)
    assert known.tolist() == [numbers] and were[0, : len(kept)].tolist() == kept
    renumbered = {old: new for new, old in enumerate(kept)}
    want = [renumbered.get(some.parents[0, old].item(), -1) for old in kept]
    assert ours.parents.tolist() == [want + [-1] * (count - len(kept))]


# Faults: each would pass for a beam search, and is found by comparison.


def top_w(beams, tokens, sums, *how):
  """Looks at as many continuations as there are beams: those behind are as good as impossible."""
  width = sums.shape[1]
  least = jax.lax.top_k(sums.reshape(len(sums), -1), width)[0][:, -1, None, None]
  return step.step(beams, tokens, jnp.where(sums >= least, sums, -1e6), *how)


def eos_forgotten(beams, tokens, sums, *how):
  return step.step(beams, tokens, jnp.where(tokens == EOS, -1e6, sums), *how)


def parents_mixed_up(beams, tokens, sums, *how):
  after, parents = step.step(beams, tokens, sums, *how)
  return after, jnp.flip(parents, axis=1)


def drafts_scores(logits, hidden, read, context, depth):
  """Guesses keep a score that is not the target's."""
  new = forest.entries_read(logits, hidden, read, context, depth)
  guessed = (read.nodes >= context.last_token.shape[1])[..., None]
  return new._replace(sums=new.sums + 0.01 * guessed)


def kept_mixed_up(read, *how):
  """What is kept of one text is taken for another's."""
  kept, *numbers = entries.keep(read, *how)
  return kept._replace(sums=jnp.roll(kept.sums, 1, axis=1)), *numbers


def kept_elsewhere(read, *how):
  """What is kept is looked for in the cache where another lies."""
  kept, known, were = entries.keep(read, *how)
  return kept, known, jnp.flip(were, axis=1)


@pytest.mark.parametrize(
  "name, fault",
  [
    ("keep", kept_mixed_up),
    ("keep", kept_elsewhere),
    ("step", top_w),
    ("step", eos_forgotten),
    ("step", parents_mixed_up),
    ("entries_read", drafts_scores),
  ],
)
def test_faults_are_found(monkeypatch, name, fault):
  case, (draft, draft_params) = t5(), DRAFTS["twice as wide"](t5())
  monkeypatch.setattr(search, name, fault)
  run = jax.jit(
    lambda *params: search._search(case.target, draft, *params, case.prompt, 3, LIMIT, 0.6, EOS)
  )
  with pytest.raises(AssertionError):
    same(run(case.params, draft_params), plain(case, 3))


@pytest.mark.skipif(importlib.util.find_spec("t5x") is None, reason="t5x is not installed")
@pytest.mark.parametrize("width", [1, 2, 4])
def test_found_is_what_t5x_finds(width):
  from t5x import decoding

  case, batch = t5(), len(t5().prompt)
  _, start = case.target.prefill(case.params, case.prompt, LIMIT + 2)
  wide = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), (start.cross, start.cross_bias))

  def tokens_to_logits(state):
    length = jnp.full(batch * width, state.cur_index, jnp.int32)
    cache = start.replace(
      length=length, layers=state.cache["layers"], cross=wide[0], cross_bias=wide[1]
    )
    logits, _, cache = case.target.extend(case.params, cache, state.cur_token)
    return logits[:, 0], {"layers": cache.layers}

  texts, scores = decoding.beam_search(
    jnp.zeros((batch, LIMIT), jnp.int32),
    {"layers": start.layers},
    tokens_to_logits,
    EOS,
    num_decodes=width,
    max_decode_len=LIMIT,
  )
  found = plain(case, width)
  np.testing.assert_array_equal(found.tokens, np.flip(texts, axis=1)[..., :LIMIT])
  np.testing.assert_allclose(found.scores, np.flip(scores, axis=1), rtol=0, atol=1e-5)


# The experiment.


def found(tokens, scores) -> search.Found:
  tokens = np.asarray(tokens)[..., None]
  ones = np.ones(tokens.shape[:2], int)
  return search.Found(tokens, ones, np.asarray(scores), ones, ones[0, 0], ones[0])


def test_ties_may_change_places_and_nothing_else():
  plain = found([[3, 4, 5]] * 6, [[-1.0, -2.0, -2.0]] * 6)
  others = found(
    [[3, 4, 5], [3, 5, 4], [4, 3, 5], [3, 4, 6], [6, 4, 5], [3, 4, 5]],
    [[-1.0, -2.0, -2.0]] * 5 + [[-1.0, -2.0, -2.1]],
  )
  same, tied = commands.compare(plain, others)
  assert same.tolist() == [True, True, False, True, False, False]
  assert tied.tolist() == [False, True, False, True, False, False]


def test_it_is_measured_over_plain_search(tmp_path, capsys):
  texts = tiny_pair.SENTENCES[:5]
  how = dict(widths=[2], factors=[1, 2], gammas=[2], batch_size=2, max_new_tokens=10)
  pair = tiny_pair.pair()
  commands.beams(pair, texts, str(tmp_path), **how, repeats=1, references=texts)
  measured = records.read(str(tmp_path / "results.jsonl"))
  assert [(r.beams, r.draft_beams, r.gamma) for r in measured] == [(2, 2, 2), (2, 4, 2)]
  for r in measured:
    assert r.identical and r.ties == 0 and 1 < r.tokens_per_round <= 3
    assert r.speedup > 0 and r.predicted_measured_cost == pytest.approx(
      r.tokens_per_round * r.target_step_ms / r.round_ms
    )
    assert r.quality == r.baseline_quality and r.num_examples == 5
  plainly = tmp_path / "plainly"
  commands.beams(pair, texts, str(plainly), **how | dict(factors=[1], gammas=[0]), repeats=0)
  (r,) = records.read(str(plainly / "results.jsonl"))
  assert (r.gamma, r.beam_nodes, r.tokens_per_round, r.identical) == (0, 2, 1.0, True)
  commands.beams(pair, texts, str(tmp_path), **how, repeats=1)
  assert len(records.read(str(tmp_path / "results.jsonl"))) == 2, "none is measured twice"
  assert "speedup" in capsys.readouterr().out
  counted = tmp_path / "counted"
  commands.beams(pair, texts, str(counted), **how, repeats=0, references=texts)
  for told, r in zip(records.read(str(counted / "results.jsonl")), measured, strict=True):
    same = "identical", "rounds", "tokens_per_round", "num_tokens", "quality", "beam_nodes"
    assert [getattr(told, name) for name in same] == [getattr(r, name) for name in same]
    assert told.speedup is None
