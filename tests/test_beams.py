"""Compare speculative beam search with plain, and plain with a search written out text by text."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax.beams import (
  BeamDraft,
  BeamResult,
  BeamSearcher,
  ModelBeamDraft,
  NullBeamDraft,
  TreeBeamDraft,
  forest,
  search,
  step,
  verified,
)
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.heads import new_head
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import InputError
from specdec_jax.load import head_draft
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.partitioning import PartitionedModel, make_mesh
from specdec_jax.models.t5 import T5Model

LIMIT, EOS = 9, 1
T5 = tiny.config(layers=1)
GPT = tiny.gpt_config(layers=1, num_positions=128)


@dataclasses.dataclass(frozen=True)
class Case:
  """A target, a draft, the parameters of both, and prompts."""

  target: object
  draft: object
  params: object
  draft_params: object
  prompt: jax.Array


@functools.cache
def t5() -> Case:
  params, sources = tiny.params(T5, 3, peak=1.0), jnp.asarray(tiny.sources(T5, 0, 6))
  return Case(T5Model(T5), T5Model(T5), params, tiny.near(params, 1, 0.2), sources)


@functools.cache
def gpt() -> Case:
  params = tiny.params(GPT, 4, peak=1.0)
  prompt = jnp.asarray(tiny.prompts(GPT, 0, [1, 2, 3, 4, 5, 6]))
  return Case(GPTModel(GPT), GPTModel(GPT), params, tiny.near(params, 1, 0.2), prompt)


FAMILIES = {"t5": t5, "gpt": gpt}


def plain(case: Case, num_beams: int, max_new_tokens: int = LIMIT) -> BeamResult:
  searcher = BeamSearcher(case.target, NullBeamDraft(), num_beams, eos_id=EOS)
  return searcher.run(Params(case.params), case.prompt, max_new_tokens=max_new_tokens)


def assert_same(ours: BeamResult, theirs: BeamResult) -> None:
  """Check that texts, their order, lengths and scores are equal."""
  np.testing.assert_array_equal(ours.tokens, theirs.tokens)
  np.testing.assert_array_equal(ours.lengths, theirs.lengths)
  np.testing.assert_allclose(ours.scores, theirs.scores, rtol=0, atol=1e-5)


@functools.partial(jax.jit, static_argnames="model")
def next_log_probs(model, params, prompt, texts):
  """Return log-probabilities [w, LIMIT, V] of every token at each position of texts [w, LIMIT].

  One forward pass runs over the prompt [P] and each text as a chain.
  """
  prompts = jnp.repeat(prompt[None], len(texts), axis=0)
  first, length = model.prompt_tokens(prompts)
  _, cache = model.prefill(params, prompts, first.shape[1] + LIMIT)
  last = jnp.take_along_axis(first, length[:, None] - 1, axis=1)
  logits, _, _ = model.extend(params, cache, jnp.concatenate([last, texts[:, :-1]], axis=1))
  return jax.nn.log_softmax(logits)


def reference_search(model, params, prompt, num_beams: int, length_penalty: float = 0.6):
  """Search one prompt by the rules of t5x, text by text, with lists; return texts and scores."""
  committed = int(model.prompt_tokens(prompt[None])[1][0])

  def divisor(length: int) -> np.float32:
    return np.float32(((5 + length) / 6) ** length_penalty)

  def best(scored_texts, count: int):  # the first of equal scores comes first
    return sorted(scored_texts, key=lambda scored: -scored[0])[:count]

  live, finished = [(np.float32(0), ())], []  # the best last
  for position in range(LIMIT):
    texts = np.zeros((num_beams, LIMIT), np.int32)
    for row, (_, text) in zip(texts, live):
      row[:position] = text
    log_probs = np.asarray(next_log_probs(model, params, prompt, texts))[:, position]
    continuations = [
      (total + log_probs[row, token], (*text, token))
      for row, (total, text) in enumerate(live)
      for token in range(log_probs.shape[1])
    ]
    continuations = best(continuations, 2 * num_beams)
    finished += [
      (total / divisor(committed + position), text)
      for total, text in continuations
      if text[-1] == EOS
    ]
    finished = best(finished, num_beams)[::-1]
    live = [scored for scored in continuations if scored[1][-1] != EOS][:num_beams][::-1]
    bound = live[-1][0] / divisor(committed + LIMIT)
    if len(finished) == num_beams and finished[0][0] > bound:
      break
  return (finished or live)[::-1]


@pytest.mark.parametrize(
  "family, num_beams",
  [
    ("t5", 3),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in [("t5", 1), ("t5", 8), ("gpt", 4)]),
  ],
)
def test_plain_search_equals_a_search_written_out(family, num_beams):
  case = FAMILIES[family]()
  result = plain(case, num_beams)
  num_ended = 0
  for row, prompt in enumerate(case.prompt):
    expected = reference_search(case.target, case.params, prompt, num_beams)
    for place, (score, text) in enumerate(expected):
      length = result.lengths[row, place]
      assert tuple(result.tokens[row, place, :length].tolist()) == text
      assert result.scores[row, place] == pytest.approx(score, abs=1e-5)
    assert not np.asarray(result.lengths)[row, len(expected) :].any()
    num_ended += sum(text[-1] == EOS for _, text in expected)
  assert num_ended >= 3, "too few texts end for a meaningful test"


def chain_draft(model, gamma: int) -> ModelDraft:
  return ModelDraft(model, Sampling(temperature=0.0), chain(gamma))


def conditioned_draft(case: Case, gamma: int) -> tuple[ModelDraft, object]:
  """Return an untrained decoder that uses the target's encoder, and its parameters."""
  sizes = dict(offsets=2, emb_dim=32, mlp_dim=16, num_decoder_layers=1)
  config = new_head(case.target.config, "conditioned", **sizes)
  params = tiny_pair.random_params(config, 3)
  factory = head_draft("conditioned", config, params, tiny.loaded(None, case.target, case.params))
  return factory.build(Sampling(temperature=0.0), chain(gamma)), factory.params


def eagle_draft(case: Case) -> tuple[BeamDraft, object]:
  """Return an untrained EAGLE head on the target's hidden states, and its parameters."""
  config = new_head(case.target.config, "eagle", gamma=2, emb_dim=8, mlp_dim=16)
  params = tiny_pair.random_params(config, 3)
  factory = head_draft("eagle", config, params, tiny.loaded(None, case.target, case.params))
  draft = factory.build(Sampling(temperature=0.0), DynamicTree(4, 2))
  return TreeBeamDraft(draft), factory.params


DRAFTS = {
  "twice as wide": lambda case: (
    ModelBeamDraft(chain_draft(case.draft, 3), 6, 99),
    case.draft_params,
  ),
  "few nodes": lambda case: (ModelBeamDraft(chain_draft(case.draft, 3), 6, 4), case.draft_params),
  "itself": lambda case: (ModelBeamDraft(chain_draft(case.target, 3), 3, 99), case.params),
  "eagle": eagle_draft,
  "prompt lookup": lambda case: (TreeBeamDraft(PromptLookupDraft(16, branching(2, 1), 2)), ()),
}


def speculate(case: Case, draft_and_params: tuple[BeamDraft, object]) -> BeamResult:
  draft, draft_params = draft_and_params
  searcher = BeamSearcher(case.target, draft, 3, eos_id=EOS)
  return searcher.run(Params(case.params, draft_params), case.prompt, max_new_tokens=LIMIT)


@pytest.mark.parametrize(
  "family, draft",
  [
    ("t5", "few nodes"),
    *(
      pytest.param("t5", draft, marks=pytest.mark.slow)
      for draft in ("prompt lookup", "itself", "twice as wide")
    ),
    pytest.param("gpt", "eagle", marks=pytest.mark.slow),
  ],
)
def test_speculative_search_equals_plain_search(family, draft):
  case = FAMILIES[family]()
  expected, result = plain(case, 3), speculate(case, DRAFTS[draft](case))
  assert_same(result, expected)
  steps = np.asarray(result.steps)
  np.testing.assert_array_equal(steps.sum(axis=0), np.asarray(expected.steps).sum(axis=0))
  assert result.num_rounds <= expected.num_rounds
  if draft == "itself":  # each pass makes all four steps, until the row ends
    steps_before = 4 * np.arange(len(steps))[:, None]
    np.testing.assert_array_equal(steps, np.clip(steps.sum(axis=0) - steps_before, 0, 4))
  if draft == "twice as wide":
    assert 1.3 < steps[steps > 0].mean() < 4, "the draft does not test rejection"


@pytest.mark.slow
def test_decoder_on_the_targets_encoder_is_a_beam_draft():
  draft, params = conditioned_draft(t5(), 2)
  assert_same(speculate(t5(), (ModelBeamDraft(draft, 4), params)), plain(t5(), 3))


@pytest.mark.slow
def test_hidden_states_of_a_conditioned_decoder_move_with_their_beam():
  """With a single beam, each round has the draft tokens of a chain, even after acceptances."""
  case, (draft, draft_params) = t5(), conditioned_draft(t5(), 3)
  never, traced, chain_draft_tokens, beam_draft_tokens = 0, [], [], []

  class RecordingDraft(ModelBeamDraft):
    def propose(self, params, state, context):
      forest, state = super().propose(params, state, context)
      traced.append(forest.tokens)
      return forest, state

  def target_of(text: jax.Array):
    """Return a target that gives nearly all probability to a text, except where it is -1."""

    def change(model, params, cache, tokens, tree, first):
      logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
      return logits + 1e3 * jax.nn.one_hot(text, T5.vocab_size), hidden, cache

    return tiny.ChangedModel(case.target, change)

  keys, verifier = jax.random.split(jax.random.key(0), 1), TokenVerifier(Sampling(temperature=0.0))
  params, prompt = Params(case.params, draft_params), case.prompt[:1]
  chains = tiny.start(case.target, draft, case.params, draft_params, prompt, LIMIT)
  chains = chains._replace(rng=keys)
  searcher = BeamSearcher(case.target, RecordingDraft(draft, 1, 4), 1, eos_id=never)
  beams = jax.jit(searcher.init, static_argnums=2)(params, prompt, LIMIT)

  @jax.jit
  def run_round(params, chains, beams, num_accepted, correction):
    draft_tokens = draft.propose(params.draft, chains.draft_state, chains.context, keys)[0].tokens
    place = jnp.arange(4)
    text = jnp.where(place < num_accepted, jnp.append(draft_tokens[0], correction), -1)
    target = target_of(jnp.where(place == num_accepted, correction, text))
    chains = Decoder(target, draft, verifier, never).round(params, chains)
    beams = dataclasses.replace(searcher, target=target).round(params, beams)
    return chains, beams, draft_tokens, traced.pop()

  for round_, (num_accepted, correction) in enumerate(((0, 5), (2, 8), (3, 3), (0, 10))):
    chains, beams, *draft_tokens = run_round(params, chains, beams, num_accepted, correction)
    chain_draft_tokens.append(np.asarray(draft_tokens[0]))
    beam_draft_tokens.append(np.asarray(draft_tokens[1]))
    assert int(chains.num_rounds[0]) == round_ + 1
    assert beams.live.beams.length == chains.length
  np.testing.assert_array_equal(chain_draft_tokens, beam_draft_tokens)
  assert not (np.array(chain_draft_tokens) == never).any()
  assert len({tuple(draft_tokens[0]) for draft_tokens in chain_draft_tokens}) > 2


@pytest.mark.slow
def test_no_node_is_verified_twice(monkeypatch):
  """No pass covers the last token of a text again, whether it was drafted or of a live sequence."""
  case, (draft, draft_params) = t5(), DRAFTS["twice as wide"](t5())
  params, traced = Params(case.params, draft_params), []

  def recording_pack(context, draft_tokens, depth, count):
    block = forest.pack_block(context, draft_tokens, depth, count)
    num_cached = context.verified.tokens.shape[1]
    new_entries = block.entries - num_cached
    traced.append((context.tokens, context.length, context.last_entries, draft_tokens, new_entries))
    return block

  monkeypatch.setattr(search, "pack_block", recording_pack)
  searcher = BeamSearcher(case.target, draft, 3, eos_id=EOS)
  run_round = jax.jit(lambda params, state: (searcher.round(params, state), traced.pop()))
  state, num_cached_last = jax.jit(searcher.init, static_argnums=2)(params, case.prompt, LIMIT), 0
  verified_texts = [[] for _ in case.prompt]
  for round_ in range(5):
    done = state.done
    state, (tokens, length, last_entries, draft_tokens, new_entries) = run_round(params, state)
    for row in np.flatnonzero(~done):
      nodes = [tuple(text[: length[row]].tolist()) for text in tokens[row]]
      for token, parent in zip(
        draft_tokens.tokens[row].tolist(), draft_tokens.parents[row].tolist()
      ):
        nodes.append((*nodes[parent], token))
      new = [text for text, entry in zip(nodes, new_entries[row]) if entry >= 0]
      verified_texts[row] += new if round_ else set(new)  # all beams begin as one text
      num_cached_last += int((last_entries[row] >= 0).sum())
  for texts in verified_texts:
    assert len(texts) == len(set(texts))
  assert num_cached_last > 9, "too few nodes were cached for a meaningful test"


def test_rows_do_not_depend_on_their_neighbors():
  case, draft = t5(), DRAFTS["few nodes"](t5())
  rows = [4, 2, 2, 2, 2, 2]  # as many as in the whole batch, so that nothing is recompiled
  some = speculate(dataclasses.replace(case, prompt=case.prompt[jnp.array(rows)]), draft)
  whole = speculate(case, draft)
  np.testing.assert_array_equal(np.asarray(whole.tokens)[rows], some.tokens)
  rounds = int(some.num_rounds)
  np.testing.assert_array_equal(np.asarray(whole.steps)[:rounds, rows], some.steps[:rounds])


def test_impossible_settings_are_reported():
  def penalized(scorer, penalty):
    searcher = BeamSearcher(t5().target, NullBeamDraft(), 2, penalty, EOS, scorer)
    return searcher.run(Params(t5().params), t5().prompt, max_new_tokens=128)

  draft, draft_params = chain_draft(t5().draft, 2), t5().draft_params
  stateful = TreeBeamDraft(ModelDraft(t5().draft, Sampling(), chain(2)))
  for call, message in (
    (lambda: plain(t5(), 9), "more than the vocabulary's 16"),
    (lambda: plain(t5(), 0), "beams is 0"),
    (lambda: plain(t5(), 2, max_new_tokens=0), "max_new_tokens is 0"),
    (lambda: penalized("t5x", 22.5), r"length_penalty is 22.5; .*-22.2, 22.2"),  # (134 / 6) ** 22.2
    (lambda: penalized("hf", 14.5), r"length_penalty is 14.5; .*-14.2, 14.2"),  # 129 ** 14.2
    (lambda: speculate(t5(), (ModelBeamDraft(draft, 2), draft_params)), "2 beams"),
    (
      lambda: speculate(t5(), (ModelBeamDraft(draft, 3, 2), draft_params)),
      "A target forward pass has 2 nodes, fewer than the search has beams",
    ),
    (lambda: speculate(t5(), (stateful, draft_params)), "ModelDraft keeps a state"),
  ):
    with pytest.raises(InputError, match=message):
      call()


def test_best_texts_come_first_and_missing_texts_are_marked():
  """One, none or both of two texts have ended. Live sequences are not added to finished texts."""
  beams = step.Beams(
    tokens=jnp.array([[[3], [4]]] * 3),
    log_probs=jnp.array([[-4.0, -3.0]] * 3),
    finished_tokens=jnp.array([[[0], [5]], [[0], [0]], [[6], [5]]]),
    scores=jnp.array([[-jnp.inf, -1.0], [-jnp.inf, -jnp.inf], [-2.0, -1.0]]),
    finished=jnp.array([[False, True], [False, False], [True, True]]),
    length=None,
  )
  texts, scores, exists = step.best_first(beams)
  assert exists.tolist() == [[True, False], [True, True], [True, True]]
  assert texts[..., 0].tolist() == [[5, 0], [4, 3], [5, 6]]
  assert scores.tolist() == [[-1, -jnp.inf], [-3, -4], [-1, -2]]


def test_nodes_of_a_tree_follow_their_own_beam():
  last_tokens, hidden = jnp.array([[2, 3]]), jnp.zeros((1, 2, 1))
  context = forest.BeamContext(**dict.fromkeys(forest.BeamContext._fields))._replace(
    prompt=jnp.ones((1, 1), int),
    tokens=last_tokens[..., None],
    length=jnp.array([1]),
    last_tokens=last_tokens,
    target_cache=(),
    hidden=hidden,
    verified=verified.empty_nodes(1, 0, 4, jnp.zeros((1, 1))),
    last_entries=jnp.array([[-1, -1]]),
    start=jnp.array([1]),
    limit=jnp.array([9]),
  )
  draft_tokens, _ = TreeBeamDraft(NullDraft(Tree((0, 0, 1)))).propose((), (), context)
  assert draft_tokens.parents.tolist() == [[0, 0, 2, 1, 1, 5]]  # 0 and 1 are the last tokens


def test_a_pass_may_have_one_node_per_beam():
  assert ModelBeamDraft(chain_draft(t5().draft, 2), 3, 3).num_nodes(3) == 3


@pytest.mark.slow
def test_equally_probable_texts_come_in_the_order_of_t5x():
  """With a uniform model, the first beam and the smallest token come first."""
  flat = jax.tree.map(jnp.zeros_like, t5().params)
  case = dataclasses.replace(t5(), params=flat, draft_params=flat, prompt=t5().prompt[:1])
  result = plain(case, 3)
  for place, (score, text) in enumerate(reference_search(case.target, flat, case.prompt[0], 3)):
    assert tuple(result.tokens[0, place, : len(text)].tolist()) == text
    assert result.scores[0, place] == pytest.approx(score, abs=1e-5)
  assert_same(speculate(case, DRAFTS["twice as wide"](case)), result)


def late_nan(model, params, cache, tokens, tree, first):
  """Return logits that are NaN from the third token of the first row on."""
  logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
  late = jnp.where(tree.positions[..., None] >= 2, jnp.nan, 0)
  return logits + late.at[1:].set(0), hidden, cache


def test_step_with_non_finite_logits_is_reported():
  case = dataclasses.replace(t5(), target=tiny.ChangedModel(t5().target, late_nan))
  result = plain(case, 2)
  np.testing.assert_array_equal(result.not_finite, [2, -1, -1, -1, -1, -1])
  np.testing.assert_array_equal(np.asarray(result.tokens)[1:], plain(t5(), 2).tokens[1:])


def test_row_that_has_ended_is_not_reported_later():
  target = tiny.ChangedModel(t5().target, late_nan)
  searcher = BeamSearcher(target, NullBeamDraft(), 2, eos_id=EOS)
  limit = np.array([2] + [LIMIT] * 5)
  result = searcher.run(Params(t5().params), t5().prompt, max_new_tokens=LIMIT, limit=limit)
  assert result.num_rounds > 2 and (np.asarray(result.not_finite) == -1).all()


def test_sharded_target_finds_the_same_texts():
  case = t5()
  sharded = dataclasses.replace(case, target=PartitionedModel(case.target, make_mesh()))
  assert_same(plain(sharded, 3), plain(case, 3))


def test_search_ends_at_the_limit_or_when_no_live_text_can_become_better():
  """As in t5x, w texts have finished, and all live texts are worse than the worst finished text."""
  beams = step.Beams(
    tokens=None,
    log_probs=jnp.array([[-9.0, -2.0], [-9.0, -2.1], [-9.0, -2.1], [-9.0, -1.0]]),
    finished_tokens=None,
    scores=jnp.array([[-2.0, -1.0], [-2.0, -1.0], [-jnp.inf, -1.0], [-2.0, -1.0]]),
    finished=jnp.array([[True, True], [True, True], [False, True], [True, True]]),
    length=jnp.array([4, 4, 4, 10]),
  )
  limit, start = jnp.full(4, 10), jnp.full(4, 1)
  t5x = functools.partial(step.Scorer, "t5x")
  assert step.search_ended(beams, t5x(0.0), start, limit).tolist() == [False, True, False, True]
  # Scores at the limit are divided by 15 / 6, at the length now by 9 / 6: -1.2 and -2.
  longer = beams._replace(log_probs=beams.log_probs - 1.0)
  assert step.search_ended(longer, t5x(1.0), start, limit).tolist() == [False, False, False, True]


def test_a_block_contains_the_proposed_nodes_that_are_not_verified():
  """Of the draft tokens, one is not proposed, one is already verified, and one has no room."""
  last_tokens, one = jnp.array([[2, 3]]), jnp.array([4])
  context = forest.BeamContext(
    prompt=None,
    tokens=None,
    length=one,
    log_probs=None,
    last_tokens=last_tokens,
    visible=jnp.zeros((1, 2, 9), bool),
    previous_tokens=None,
    previous_visible=None,
    slot=one,
    key_positions=jnp.zeros((1, 9), int),
    target_cache=None,
    hidden=None,
    verified=verified.empty_nodes(1, 1, 4, jnp.zeros((1, 1))),
    last_entries=jnp.array([[-1, -1]]),
    eos_ids=jnp.array([EOS]),
    start=one,
    limit=one,
  )
  draft_tokens = forest.Forest(
    tokens=jnp.array([[5, -1, 6, 7, 8]]),
    parents=jnp.array([[0, 0, 1, 1, 2]]),
    entries=jnp.array([[-1, -1, 0, -1, -1]]),
  )
  block = jax.jit(lambda: forest.pack_block(context, draft_tokens, 2, 4))()
  assert block.nodes.tolist() == [[0, 1, 2, 5]] and block.tokens.tolist() == [[2, 3, 5, 7]]
  assert block.entries[0, jnp.array([0, 1, 2, 4, 5])].tolist() == [1, 2, 3, 0, 4]
  assert (block.entries[0, jnp.array([3, 6])] < 0).all()
  assert block.parents.tolist() == [[-1, -1, 1, 2]]
  assert block.placed.positions.tolist() == [[3, 3, 4, 4]]  # the last committed tokens are at 3


def test_unverified_nodes_have_no_children_and_no_scores_and_are_not_cached():
  """Entries 0 and 2 are roots, 1 follows 0, and 3 follows 1; -1 is no entry, not the last one."""
  nodes = verified.VerifiedNodes(
    tokens=jnp.array([[5, 7, 5, 9]]),
    parents=jnp.array([[-1, 0, -1, 1]]),
    continuations=jnp.array([[[7, 8], [9, 6], [4, 3], [2, 7]]]),
    log_probs=jnp.array([[[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0], [-7.0, -8.0]]]),
    hidden=jnp.zeros((1, 4, 1)),
  )
  parents, tokens = jnp.array([[-1, -1, 0, 0, 1, 3]]), jnp.array([[5, 7, 7, 5, 9, 7]])
  assert verified.find_child(nodes, parents, tokens).tolist() == [[-1, -1, 1, -1, 3, -1]]
  log_probs, missing = verified.continuation_log_prob(nodes, parents, tokens), -jnp.inf
  assert log_probs.tolist() == [[missing, missing, -1, missing, -3, -8]]
  prune = jax.jit(verified.prune, static_argnames=("count", "depth"))
  for last_entries, count, expected, renumbered in (
    ([0, -1], 4, [0, 1, 3], [0, -1]),  # descendants of entry 0, without the other root
    ([1, 2], 4, [1, 2, 3], [0, 1]),
    ([0, 3], 2, [0, 1], [0, -1]),  # there is no room for entry 3
    ([-1, -1], 4, [], [-1, -1]),
  ):
    cached, new_last, old_entries = prune(nodes, jnp.array([last_entries]), count, depth=2)
    assert new_last.tolist() == [renumbered]
    assert old_entries[0, : len(expected)].tolist() == expected
    new_entries = {old: new for new, old in enumerate(expected)}
    parents = [new_entries.get(nodes.parents[0, old].item(), -1) for old in expected]
    assert cached.parents.tolist() == [parents + [-1] * (count - len(expected))]


# Injected faults. Each resembles a beam search, and the comparison must find it.


def considers_w_continuations(beams, tokens, log_probs, *rules):
  """Consider only w of the 2w continuations by making the others practically impossible."""
  num_beams = log_probs.shape[1]
  top, _ = jax.lax.top_k(log_probs.reshape(len(log_probs), -1), num_beams)
  log_probs = jnp.where(log_probs >= top[:, -1, None, None], log_probs, -1e6)
  return step.step(beams, tokens, log_probs, *rules)


def forgets_finished_texts(beams, tokens, log_probs, *rules):
  log_probs = jnp.where(tokens == EOS, -1e6, log_probs)
  return step.step(beams, tokens, log_probs, *rules)


def mixes_up_parents(beams, tokens, log_probs, *rules):
  new_beams, parents = step.step(beams, tokens, log_probs, *rules)
  return new_beams, jnp.flip(parents, axis=1)


def keeps_scores_of_the_draft(log_probs, hidden, block, context, *sizes):
  """Give draft tokens scores that differ from the target's."""
  new = forest.verified_nodes(log_probs, hidden, block, context, *sizes)
  is_draft_token = (block.nodes >= context.last_tokens.shape[1])[..., None]
  return new._replace(log_probs=new.log_probs + 0.01 * is_draft_token)


def mixes_up_cached_nodes(nodes, last_entries, count, depth):
  """Give a cached node the log-probabilities of a different node."""
  cached, last_entries, old_entries = verified.prune(nodes, last_entries, count, depth)
  cached = cached._replace(log_probs=jnp.roll(cached.log_probs, 1, axis=1))
  return cached, last_entries, old_entries


def mixes_up_cache_slots(nodes, last_entries, count, depth):
  """Give a cached node the slot of a different node."""
  cached, last_entries, old_entries = verified.prune(nodes, last_entries, count, depth)
  return cached, last_entries, jnp.flip(old_entries, axis=1)


FAULTS = {
  considers_w_continuations: "step",
  forgets_finished_texts: "step",
  mixes_up_parents: "step",
  keeps_scores_of_the_draft: "verified_nodes",
  mixes_up_cached_nodes: "prune",
  mixes_up_cache_slots: "prune",
}


@pytest.fixture(scope="module")
def run_with_fault():
  """Return a function from the index of a fault, or -1, to the result of the search with it.

  The index is an argument of the compiled program, so that all faults share one program.
  """
  case, (draft, draft_params) = t5(), DRAFTS["twice as wide"](t5())
  searcher, selected = BeamSearcher(case.target, draft, 3, eos_id=EOS), []

  def with_faults(name):
    correct = getattr(search, name)
    functions = [fault if patched == name else correct for fault, patched in FAULTS.items()]

    def call(*args):
      branches = [functools.partial(function, *args) for function in dict.fromkeys(functions)]
      places = [[*dict.fromkeys(functions)].index(function) for function in (*functions, correct)]
      return jax.lax.switch(jnp.array(places)[selected[0]], branches)

    return call

  def run(params: Params, index: jax.Array) -> BeamResult:
    selected[:] = [index]
    return searcher.result(searcher.run_rounds(params, searcher.init(params, case.prompt, LIMIT)))

  params = Params(case.params, draft_params)
  with pytest.MonkeyPatch.context() as patch:
    for name in {*FAULTS.values()}:
      patch.setattr(search, name, with_faults(name))
    compiled = jax.jit(run).lower(params, jnp.array(0)).compile()
  return lambda index: compiled(params, jnp.array(index))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_found(run_with_fault, fault):
  with pytest.raises(AssertionError):
    assert_same(run_with_fault([*FAULTS].index(fault)), plain(t5(), 3))


@pytest.mark.slow
def test_program_with_faults_is_correct_without_them(run_with_fault):
  assert_same(run_with_fault(-1), plain(t5(), 3))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("t5x") is None, reason="t5x is not installed")
@pytest.mark.parametrize("num_beams", [1, 4])
def test_plain_search_equals_t5x(num_beams):
  from t5x import decoding

  case, batch = t5(), len(t5().prompt)
  _, start = case.target.prefill(case.params, case.prompt, LIMIT + 2)
  cross, cross_bias = jax.tree.map(
    lambda x: jnp.repeat(x, num_beams, axis=0), (start.cross, start.cross_bias)
  )

  def tokens_to_logits(state):
    length = jnp.full(batch * num_beams, state.cur_index, jnp.int32)
    cache = start.replace(
      length=length, layers=state.cache["layers"], cross=cross, cross_bias=cross_bias
    )
    logits, _, cache = case.target.extend(case.params, cache, state.cur_token)
    return logits[:, 0], {"layers": cache.layers}

  texts, scores = decoding.beam_search(
    jnp.zeros((batch, LIMIT), jnp.int32),
    {"layers": start.layers},
    tokens_to_logits,
    EOS,
    num_decodes=num_beams,
    max_decode_len=LIMIT,
  )
  result = plain(case, num_beams)
  np.testing.assert_array_equal(result.tokens, np.flip(texts, axis=1)[..., :LIMIT])
  found = np.maximum(result.scores, decoding.NEG_INF)  # a missing text has -inf in this project
  np.testing.assert_allclose(found, np.flip(scores, axis=1), rtol=0, atol=1e-5)
