"""Test drafts that stop early: proposals, verified lengths, and predictors of acceptance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_backoff import written
from test_contract import LIMIT, t5
from test_speculative import CONFIG, DRAFT_CONFIG

from specdec_jax.contrib.bild import HandOverDraft, RollbackVerifier
from specdec_jax.contrib.stopping import AdaptiveStoppingDraft, StoppingDraft
from specdec_jax.core import decode
from specdec_jax.core.counts import acceptance_by_position
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import Outcome, Proposal, Verification
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.drafts.several import ForestDraft
from specdec_jax.drafts.stop_at_miss import StopAtMissDraft
from specdec_jax.drafts.uniform import UniformDraft
from specdec_jax.errors import InputError

pytestmark = pytest.mark.slow

GAMMA = 4
KEY = jax.random.key(0)


def test_proposals_are_those_of_the_model_while_it_is_confident():
  models, sampling = t5(), Sampling()
  whole = ModelDraft(models.target, sampling, chain(GAMMA))
  draft, keys = StoppingDraft(whole, 0.13), jax.random.split(jax.random.key(1), 6)
  params = models.params, models.params
  state = tiny.start(models.target, draft, *params, models.prompts, LIMIT)
  args = models.params, state.draft_state, state.context, keys
  (want, _), (got, _) = (jax.jit(one.propose)(*args) for one in (whole, draft))
  inputs = np.pad(np.asarray(want.tokens)[:, :-1], ((0, 0), (1, 0)))
  probs = jax.nn.softmax(tiny.teacher_forced(CONFIG)(models.params, models.prompts, inputs))
  products = np.cumprod(np.asarray(probs).max(axis=-1)[:, :-1], axis=1)
  made = 1 + (products >= 0.13).sum(axis=1)
  assert 1 < made.mean() < GAMMA
  is_made = np.arange(GAMMA) < made[:, None]
  np.testing.assert_array_equal(got.tokens, np.where(is_made, want.tokens, -1))
  np.testing.assert_allclose(got.q, np.where(is_made[..., None], want.q, 0), atol=1e-6)


@pytest.mark.parametrize("num_tokens, threshold, made", [(4, 0.26, 1)])
def test_draft_continues_exactly_at_the_threshold(num_tokens, threshold, made):
  """The model's next tokens are equally probable, so that its confidence is 1 / num_tokens."""

  def uniform(model, params, cache, tokens, tree, first):
    logits, hidden, cache = model.extend(params, cache, tokens, tree, first)
    possible = jnp.arange(logits.shape[-1]) < num_tokens
    return jnp.where(possible, 0.0, -jnp.inf) + 0 * logits, hidden, cache

  models = t5()
  model = tiny.ChangedModel(models.target, uniform)
  draft = StoppingDraft(ModelDraft(model, Sampling(), chain(GAMMA)), threshold)
  state = tiny.start(models.target, draft, models.params, models.params, models.prompts, LIMIT)
  keys = jax.random.split(KEY, len(models.prompts))
  got, _ = draft.propose(models.params, state.draft_state, state.context, keys)
  np.testing.assert_array_equal((got.tokens >= 0).sum(axis=1), made)


def test_target_verifies_only_the_proposed_length():
  """The target's logits are those of the whole block, and 0 at positions that are skipped."""
  models = t5()
  prompts = jnp.asarray(models.prompts[:2])
  _, cache = models.target.prefill(models.params, prompts, 12)
  block = jnp.array([[0, 3, -1, -1, -1], [0, 2, 4, -1, -1]])
  args = models.params, cache, block, chain(4)
  extend = functools.partial(decode._extend, models.target)
  whole, _, _ = extend(*args)
  for lengths, read in [((1, 2, 3, 4), 3), ((1, 3, 4), 4), ((4,), 5)]:
    tree = Tree(range(4), lengths)
    logits, hidden, _ = jax.jit(extend, static_argnums=3)(*args[:3], tree)
    np.testing.assert_allclose(logits[:, :read], whole[:, :read], atol=1e-5)
    assert not np.asarray(logits[:, read:]).any() and hidden.shape[1] == 5


def test_draft_token_that_was_not_proposed_is_not_verified():
  models, sampling = t5(), Sampling(0.0)
  draft = StoppingDraft(ModelDraft(models.target, sampling, chain(GAMMA)), 0.13)
  out = tiny.speculative_decode(
    *(models.target, draft, models.params, models.params, models.prompts),
    jax.random.split(jax.random.key(0), 6),
    max_new_tokens=LIMIT,
    verifier=TokenVerifier(sampling),
    eos_id=-1,
  )
  rounds = jax.tree.map(np.asarray, out.rounds)
  made = (rounds.draft_tokens >= 0).sum(axis=-1)
  ran = rounds.num_emitted > 0
  np.testing.assert_array_equal(rounds.num_accepted[ran], made[ran])
  assert 1 < made[ran].mean() < GAMMA and acceptance_by_position([out]) == [1, 1, 1, None]
  assert not out.rounds.acceptance_counts()[1].any()


def test_bild_hands_over_and_rolls_back():
  """Decoding with both thresholds is BiLD's policy, applied token by token to whole texts."""
  fallback, rollback, models, sampling = 0.27, 1.7, t5(), Sampling(0.0)
  draft = HandOverDraft(ModelDraft(models.draft, sampling, chain(GAMMA)), fallback)
  out = tiny.speculative_decode(
    *(models.target, draft, models.params, models.draft_params, models.prompts),
    jax.random.split(KEY, len(models.prompts)),
    max_new_tokens=LIMIT,
    verifier=RollbackVerifier(sampling, rollback),
    eos_id=-1,
  )
  events = {"handed over": 0, "rolled back": 0, "kept": 0}
  for prompt, tokens in zip(models.prompts, np.asarray(out.tokens)):

    def probs(config, params, text, prompt=prompt):
      inputs = np.pad(text, (0, LIMIT + 2 * GAMMA - len(text)))[None]
      logits = tiny.teacher_forced(config)(params, prompt[None], inputs)[0]
      return np.asarray(jax.nn.softmax(logits))[: len(text)]

    text = [0]
    while len(text) <= LIMIT:
      start = len(text)
      while len(text) < start + GAMMA:
        small = probs(DRAFT_CONFIG, models.draft_params, text)[-1]
        if small.max() < fallback:
          events["handed over"] += 1
          break
        text.append(int(small.argmax()))
      large = probs(CONFIG, models.params, text)
      disagreement = -np.log(large[np.arange(len(text) - 1), text[1:]])[start - 1 :]
      kept = start + int(np.cumprod(disagreement <= rollback).sum())
      events["rolled back"] += kept < len(text)
      events["kept"] += int((large.argmax(axis=1)[start - 1 : kept - 1] != text[start:kept]).sum())
      text = [*text[:kept], int(large[kept - 1].argmax())]
    np.testing.assert_array_equal(tokens, text[1 : LIMIT + 1])
  assert min(events.values()) > 0, events


def test_threshold_follows_the_acceptance_rate_of_the_rounds():
  models = t5()
  whole = ModelDraft(models.target, Sampling(), chain(GAMMA))
  draft = AdaptiveStoppingDraft(whole, 0.1, goal=0.6, step=0.08, memory=0.25)
  params, batch = (models.params, models.params), len(models.prompts)
  state = tiny.start(models.target, draft, *params, models.prompts, LIMIT).draft_state
  lengths = jnp.full(batch, 5)
  want, rate = 0.1, 0.6
  for proposed, accepted in ((4, 4), (2, 2), (4, 1), (3, 0), (1, 0)):
    tokens = jnp.broadcast_to(jnp.where(jnp.arange(GAMMA) < proposed, 3, -1), (batch, GAMMA))
    verification = Verification(jnp.full(batch, accepted), lengths)
    outcome = Outcome(Proposal(tokens), None, None, verification, lengths, lengths)
    state = draft.observe(models.params, state, outcome)
    rate = 0.25 * rate + 0.75 * accepted / proposed
    want = max(0, want + (0.08 if rate <= 0.6 else -0.08))
    np.testing.assert_allclose(state.threshold, want, rtol=1e-6)
  assert want == pytest.approx(3 * 0.08)
  context = tiny.start(models.target, draft, *params, models.prompts, LIMIT).context
  keys = jax.random.split(jax.random.key(1), batch)
  got, _ = jax.jit(draft.propose)(models.params, state, context, keys)
  fixed, _ = jax.jit(StoppingDraft(whole, want).propose)(models.params, state.inner, context, keys)
  np.testing.assert_array_equal(got.tokens, fixed.tokens)


def test_drafts_that_cannot_stop_early_raise():
  model = ModelDraft(t5().draft, Sampling(), chain(2))
  with pytest.raises(InputError, match="threshold is 1.5"):
    StoppingDraft(model, 1.5)
  with pytest.raises(InputError, match="proposes chains"):
    StoppingDraft(ModelDraft(t5().draft, Sampling(), branching(2)), 0.5)
  with pytest.raises(InputError, match="stops early"):
    ForestDraft((StoppingDraft(model, 0.5),), 6)


def test_round_without_a_proposal_is_an_autoregressive_step():
  """Prompt lookup proposes nothing for the first text, and different numbers of tokens for the
  other texts."""
  draft = StopAtMissDraft(PromptLookupDraft(9, chain(5), 2))
  assert draft.tree.verify_lengths == (0, 1, 2, 4, 5)
  context = written([[0, 2, 3], [0, 4, 5, 6, 7, 4], [0, 3, 3]])
  source = jnp.array([[1, 0, 0, 0], [8, 4, 1, 0], [1, 0, 0, 0]])
  tokens = draft.propose((), (), context._replace(prompt=source), jax.random.split(KEY, 3))[
    0
  ].tokens
  assert tokens.tolist() == [[-1] * 5, [1, -1, -1, -1, -1], [3] * 5]
  with pytest.raises(InputError, match="must select its tokens"):
    StopAtMissDraft(UniformDraft(9, chain(2))).propose((), (), context, jax.random.split(KEY, 3))
