"""The checker passes exact decoding and finds every injected fault, at temperature 0 and above."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from self_draft import rounds_of_self_draft
from slots import slots_hold
from test_processors import FAULTS
from test_t5 import sees_its_cousins
from tiny import speculative_decode

from specdec_jax import batching
from specdec_jax import pair as pair_module
from specdec_jax.commands.check import check_exactness
from specdec_jax.core import decode, trees
from specdec_jax.core import sampling as sampling_module
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.sampling import Sampling, distribution, sample
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import DecodeResult, Proposal, Rounds, Verification, Verifier
from specdec_jax.core.verify import tokens
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.core.verify.tokens import TokenVerifier, validated_q
from specdec_jax.errors import InputError
from specdec_jax.exactness import texts
from specdec_jax.exactness.argmax import (
  Divergence,
  Rounding,
  compare_argmax,
  first_divergences,
  node_moves,
  share_of,
)
from specdec_jax.exactness.checker import (
  Checker,
  Setting,
  detectable_errors,
  rounds_row,
  samples_row,
)
from specdec_jax.exactness.martingale import detectable_shift, within_rounds
from specdec_jax.exactness.paths import plans_of, shapes_of
from specdec_jax.exactness.processed import target_probs
from specdec_jax.exactness.texts import TextScores, score_texts
from specdec_jax.load import load_pair
from specdec_jax.models.layers import RelativePositionBias
from specdec_jax.models.simulated import SimulatedModel

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0)
SAMPLINGS = {
  "temperature 1": Sampling(),
  "temperature 0.6": Sampling(temperature=0.6),
  "top-k": Sampling(top_k=10),
  "top-p": Sampling(top_p=0.7),
}
SENTENCES = tiny_pair.SENTENCES
TEXTS = SENTENCES[:4]
GAMMA = 2
TREE = Tree((0, 0, 1, 2, 2, 5))
LEVEL = 1e-6  # significance level of each comparison: a correct program fails it this often


def sampled(sampling, decode):
  """Return the scores of the tokens of about 1,600 outputs."""
  settings = DecodeSettings(sampling, batch_size=32, max_new_tokens=4)
  return score_texts(tiny_pair.pair(), TEXTS, decode, settings, num_tokens=6000)


def holds(found):
  return samples_row([found], "", LEVEL).holds


argmax = functools.partial(
  compare_argmax,
  *(tiny_pair.pair(), TEXTS),
  block=GAMMA + 1,
  settings=DecodeSettings(GREEDY, 4, 12),
  rounding=Rounding(1e-3),
)


# Exact decoding passes.


def test_exact_samples_pass():
  sampling = SAMPLINGS["temperature 0.6"]
  found = sampled(sampling=sampling, decode=tiny_pair.pair().decode_fn(sampling, chain(GAMMA)))
  assert holds(found) and found.num_impossible == 0
  (of_draft,) = found.drifts()["draft"]
  assert found.num_tokens >= 6000 and detectable_shift(of_draft, LEVEL) < 0.3


def test_exact_argmax_passes():
  plain, ours = (tiny_pair.pair().decode_fn(GREEDY, chain(gamma)) for gamma in (0, GAMMA))
  assert argmax(autoregressive=plain, speculative=ours) == []


@pytest.mark.parametrize(
  "tree, by_paths", [(chain(GAMMA), False), (TREE, True), (DynamicTree(6, 3), True)]
)
def test_target_as_its_own_draft_takes_the_fewest_rounds(tree, by_paths):
  rounds, fewest = rounds_of_self_draft(tiny_pair.pair(), TEXTS, tree, 4, 12, by_paths)
  assert rounds == fewest and fewest >= len(TEXTS)


# Injected faults. Each changes one part of the loop.


@dataclasses.dataclass(frozen=True)
class JudgedBy(Verifier):
  """Verifier for chains that calls a function of keys [B], x [B, G], q [B, G, V] and p [B, G + 1,
  V]."""

  sampling: Sampling
  judge: Callable
  exact = False

  def verify(self, rng, tree, proposal, logits):
    p = distribution(logits, self.sampling)
    return self.judge(rng, proposal.tokens, validated_q(tree, proposal, p), p)


def judge_with(accept=lambda u, q, p: u * q < p, residual=lambda p, q: jnp.maximum(p - q, 0)):
  """Verify by Algorithm 1, with options that inject a fault."""

  def judge(rng, x, q, p):
    keys = jax.vmap(lambda key: jax.random.split(key, 2), out_axes=1)(rng)
    u = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys[0])

    def of_x(probs):
      return jnp.take_along_axis(probs, x[..., None], axis=-1)[..., 0]

    n = jnp.cumprod(accept(u, of_x(q), of_x(p[:, :-1])), axis=1).sum(axis=1)

    def at_n(probs):
      return jnp.take_along_axis(probs, n[:, None, None], axis=1)[:, 0]

    weights = residual(at_n(p), at_n(jnp.pad(q, ((0, 0), (0, 1), (0, 0)))))
    weights = jnp.where(weights.sum(axis=-1, keepdims=True) > 0, weights, at_n(p))
    return Verification(n, sample(keys[1], weights))

  return judge


def drops_bonus(rng, x, q, p):
  """After a round with all tokens accepted, emit the last draft token again instead of the bonus
  token."""
  n, next_token, _ = judge_with()(rng, x, q, p)
  all_stand = n == x.shape[1]
  return Verification(n - all_stand, jnp.where(all_stand, x[:, -1], next_token))


def bonus_of_the_draft_token_before(rng, x, q, p):
  """Sample the bonus token from the distribution at the last draft token, not from the next one."""
  return judge_with()(rng, x, q, p.at[:, -1].set(p[:, -2]))


def unnormalised(p, q):
  """Return a residual whose missing mass is on the last token, as in sampling without
  normalisation."""
  left = jnp.maximum(p - q, 0)
  return left.at[:, -1].add(1 - left.sum(axis=-1))


JUDGES = {
  "none": judge_with(),
  "accepts when p < q": judge_with(accept=lambda u, q, p: u * p < q),
  "accepts whatever p says": judge_with(accept=lambda u, q, p: u < 2),
  "p instead of the residual": judge_with(residual=lambda p, q: p),
  "residual not normalised": judge_with(residual=unnormalised),
  "bonus of the draft token before": bonus_of_the_draft_token_before,
}


def with_rule(verifier, change=lambda proposal: proposal, gamma=GAMMA):
  """Decode speculatively with this verifier and with a draft whose proposals are changed."""
  pair = tiny_pair.pair()
  draft = pair.draft.build(verifier.sampling, chain(gamma))
  draft = tiny.ChangedDraft(draft, lambda params, proposal: change(proposal))
  params = pair.target.params, pair.draft.params
  return functools.partial(speculative_decode, pair.target.model, draft, *params, verifier=verifier)


class Telling(tiny.ChangedDraft):
  """Wrapped draft whose parameters also hold the index of a verifier."""

  def init(self, params, context, hidden):
    return self.draft.init(params[0], context, hidden)

  def propose(self, params, state, context, rng):
    told[:] = params[1:]
    return self.draft.propose(params[0], state, context, rng)

  def observe(self, params, state, outcome):
    return self.draft.observe(params[0], state, outcome)


told = []


@functools.cache
def of_any_judge(sampling):
  """Decode with a verifier that the parameters select, so that all verifiers share one program."""

  def judge(*args):
    return jax.lax.switch(told[0], [*JUDGES.values()], *args)

  draft = Telling(tiny_pair.pair().draft.build(sampling, chain(GAMMA)), None)
  return functools.partial(
    speculative_decode, tiny_pair.pair().target.model, draft, verifier=JudgedBy(sampling, judge)
  )


def simulated(pair):
  return tiny_pair.changed(pair, model=SimulatedModel(pair.target.model, 0.5))


def with_target(change):
  """Return a pair whose target's `extend` is `change`, a function of (model, params, cache,
  *block)."""
  pair = tiny_pair.pair()
  return tiny_pair.changed(pair, model=tiny.ChangedModel(pair.target.model, change))


@pytest.mark.parametrize("fault", JUDGES)
def test_verification_faults_are_detected(fault):
  sampling = SAMPLINGS["temperature 1"]
  pair = tiny_pair.pair()
  params = pair.target.params, (pair.draft.params, [*JUDGES].index(fault))
  decode = functools.partial(of_any_judge(sampling), *params)
  joint = sampled(sampling=sampling, decode=decode)
  assert holds(joint) == (fault == "none"), (fault, joint)


def test_dropped_bonus_token_is_detected():
  """The output is correct, so only the number of rounds shows it."""
  pair = dataclasses.replace(
    tiny_pair.pair(), verifier=lambda sampling: JudgedBy(sampling, drops_bonus)
  )
  rounds, fewest = rounds_of_self_draft(pair, TEXTS, chain(GAMMA), 4, 12)
  assert rounds > 1.2 * fewest


def test_random_numbers_shared_by_draft_and_verifier_are_detected():
  """The draft stores the uniform number that it sampled with, and the verifier accepts by it."""
  sampling, left = SAMPLINGS["temperature 1"], []

  def u(rng):
    return jax.vmap(lambda key: jax.random.uniform(key, (1,)))(rng)

  class Leaving(tiny.ChangedDraft):
    def propose(self, params, state, context, rng):
      (_, q, _), state = self.draft.propose(params, state, context, rng)
      left[:] = [u(rng)]
      draft_tokens = (jnp.cumsum(q, axis=-1) > left[0][..., None]).argmax(axis=-1)  # inversion
      return Proposal(draft_tokens.astype(jnp.int32), q), state

  pair, judge = tiny_pair.pair(), judge_with(accept=lambda u, q, p: left[0] * q < p)
  draft = Leaving(pair.draft.build(sampling, chain(1)), None)
  models = pair.target.model, draft, pair.target.params, pair.draft.params
  decode = functools.partial(speculative_decode, *models, verifier=JudgedBy(sampling, judge))
  assert not holds(sampled(sampling=sampling, decode=decode))


def test_q_recomputed_without_temperature_is_detected():
  sampling = SAMPLINGS["temperature 0.6"]

  def forget(proposal):
    return forgetful(proposal, 0.6)

  decode = with_rule(TokenVerifier(sampling), forget)
  assert not holds(sampled(sampling=sampling, decode=decode))


def forgetful(proposal, temperature):
  """Report q at temperature 1 for the same draft tokens."""
  q = distribution(temperature * jnp.log(proposal.q), Sampling())
  return proposal._replace(q=q)


def test_top_k_on_one_side_only_is_detected():
  pair, sampling = tiny_pair.pair(), SAMPLINGS["top-p"]
  models = (
    pair.target.model,
    pair.draft.build(sampling, chain(GAMMA)),
    pair.target.params,
    pair.draft.params,
  )
  plainly = TokenVerifier(Sampling(sampling.temperature))
  decode = functools.partial(speculative_decode, *models, verifier=plainly)
  joint = sampled(sampling=sampling, decode=decode)
  assert joint.num_impossible > 0 and not holds(joint)


def off_by_one(model, params, cache, *block):
  """After the first round, keep one token too many in the cache."""
  moved = model.commit(cache, cache.length + (cache.length > 0))
  logits, hidden, after = model.extend(params, moved, *block)
  return logits, hidden, model.commit(after, cache.length)


def neighbours_cache(model, params, cache, *block):
  """After the first round, let each row attend to the source of the row before it."""
  late = (cache.length > 0)[:, None, None, None]

  def roll(x):
    return jnp.where(late, jnp.roll(x, 1, axis=0), x)

  read = cache.replace(cross=jax.tree.map(roll, cache.cross), cross_bias=roll(cache.cross_bias))
  logits, hidden, after = model.extend(params, read, *block)
  return logits, hidden, after.replace(cross=cache.cross, cross_bias=cache.cross_bias)


def sees_cousins(model, params, cache, *block):
  """Let a node attend to all earlier nodes of the tree, as in a chain."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trees, "_place_tree", functools.partial(sees_its_cousins, trees._place_tree))
    return model.extend(params, cache, *block)


class Backwards(tiny.ChangedModel):
  """Move the accepted path in the wrong order."""

  def commit(self, cache, length, tree=None, path=None):
    return self.model.commit(cache, length, tree, None if path is None else path[:, ::-1])


def off_tree(target):
  """Return the share of surplus rounds of the self-draft per path, and the texts that are not
  ties."""
  pair, tree, texts = (
    tiny_pair.changed(tiny_pair.pair(), model=target),
    branching(3, 2, 1),
    SENTENCES[:16],
  )
  rounds, fewest = rounds_of_self_draft(pair, texts, tree, 16, 24, by_paths=True)
  decoders = tiny_pair.pair().decode_fn(GREEDY, chain(0)), pair.decode_fn(GREEDY, tree)
  settings = DecodeSettings(GREEDY, 16, 24)
  parted = compare_argmax(pair, texts, *decoders, tree.num_nodes, settings, Rounding(1e-3))
  return rounds / fewest - 1, sum(not d.is_tie for _, d in parted)


@pytest.mark.parametrize("fault", ["mask", "commit"])
def test_tree_faults_are_detected_at_temperature_0(fault):
  own = tiny_pair.pair().target.model
  changed = tiny.ChangedModel(own, sees_cousins)
  backwards = Backwards(own, lambda model, *block: model.extend(*block))
  too_many, faults = off_tree({"mask": changed, "commit": backwards}[fault])
  assert too_many > 0.05 and faults > 0


@pytest.mark.parametrize("fault", [off_by_one, neighbours_cache])
def test_cache_faults_are_detected_at_temperature_0(fault):
  good, bad = tiny_pair.pair(), with_target(fault)
  divergences = argmax(
    autoregressive=good.decode_fn(GREEDY, chain(0)), speculative=bad.decode_fn(GREEDY, chain(GAMMA))
  )
  assert divergences and not all(d.is_tie for _, d in divergences)


def test_cache_faults_are_detected_in_samples():
  sampling = SAMPLINGS["temperature 1"]
  decode = with_target(neighbours_cache).decode_fn(sampling, chain(GAMMA))
  assert not holds(sampled(sampling=sampling, decode=decode))


# Faults of slots, of EOS in a block, and of joint distributions, at the checker's own settings.


def of_setting(check, sampling, gamma=3, pair=None, **settings):
  """Return the result of a check of one setting, with the settings of a default run."""
  checker = Checker(pair or tiny_pair.pair(), SENTENCES, [chain(gamma)], 8, 64, 0, None)
  checker.moved[chain(gamma)] = 0.0
  batch_size = 32 if check == "rounds" else 8
  return getattr(checker, check)(Setting(sampling, chain(gamma), batch_size), **settings)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["argmax", "sampling"])
def test_exact_slots_pass(sampling):
  holds, found = slots_hold(tiny_pair.pair(), SENTENCES, sampling, chain(3))
  assert holds and not found.divergences


@pytest.mark.parametrize(
  "field, sampling",
  [
    *[("rng", Sampling()), ("limit", GREEDY), ("target_cache", GREEDY), ("draft_state", GREEDY)],
    ("prompt", GREEDY),  # which logits processors depend on
  ],
)
def test_slot_that_keeps_a_field_of_the_previous_text_is_detected(field, sampling, monkeypatch):
  exact = batching._exchange

  def exchange(slots, slot, block, row):
    new, used = exact(slots, slot, block, row)
    kept = {field: getattr(slots.state, field)}
    return new._replace(state=new.state._replace(**kept)), used

  monkeypatch.setattr(batching, "_exchange", exchange)
  monkeypatch.setattr(batching, "_run", jax.jit(lambda *args, **more: batching.run(*args, **more)))
  assert not slots_hold(tiny_pair.pair(), SENTENCES, sampling, chain(3))[0]


@pytest.mark.parametrize(
  "change",
  [lambda x: jnp.roll(x, -1, axis=1), lambda x: x.astype(jnp.bfloat16)],
  ids=["next node", "bfloat16"],
)
def test_wrong_log_probs_are_detected(change, monkeypatch):
  class Wrong(decode.Decoder):
    def _log_probs(self, before, after, *rest):
      return super()._log_probs(change(before), change(after), *rest)

  monkeypatch.setattr(pair_module, "Decoder", Wrong)
  holds, found = slots_hold(tiny_pair.pair(), SENTENCES, GREEDY, chain(3))
  assert not found.divergences and not holds


@pytest.mark.parametrize("number", [1, -1])
def test_number_of_tokens_off_by_one_at_an_eos_in_a_block_is_detected(number, monkeypatch):
  class OffByOne(decode.Decoder):
    def _cut(self, state, *args):
      emitted, count, ends = super()._cut(state, *args)
      last = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
      is_inside = (last == self.eos_id) & (count > 1) & (count < emitted.shape[1])
      return emitted, jnp.where(is_inside, count + number, count), ends

  monkeypatch.setattr(pair_module, "Decoder", OffByOne)
  row = of_setting("outputs", GREEDY)
  assert not row.holds and "'(end)'" in "".join(row.lines)


def test_uniform_shared_by_two_draft_tokens_is_detected():
  """Token 7 is accepted with the uniform of token 1."""
  exact = tokens.uniform_rows

  class Shared(TokenVerifier):
    def verify(self, *args):
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "uniform_rows", lambda *of: (u := exact(*of)).at[:, 6].set(u[:, 0]))
        return super().verify(*args)

  def lowest(verifier):
    pair = dataclasses.replace(tiny_pair.pair(), verifier=verifier)
    scored = of_setting("rounds", Sampling(), 7, pair, num_draft_tokens=28_000, seed=1)
    drifts = {name: drift.p_value for name, drift in within_rounds(scored).items()}
    return min(drifts, key=drifts.get), min(drifts.values())

  assert lowest(TokenVerifier)[1] > 1e-4
  name, p_value = lowest(Shared)
  assert name == "acceptance of draft token 7 with that of 1" and p_value < LEVEL


@pytest.mark.parametrize("module", [sampling_module, tokens], ids=["everywhere", "verifier"])
def test_top_p_applied_twice_is_detected(module, monkeypatch):
  sampling, exact = Sampling(top_p=0.9), sampling_module.filtered

  def twice(probs, logits, sampling):
    return exact(exact(probs, logits, sampling), logits, sampling)

  def distribution_twice(logits, sampling):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sampling_module, "filtered", twice)
      return distribution(logits, sampling)

  if module is sampling_module:
    monkeypatch.setattr(module, "filtered", twice)
  else:
    monkeypatch.setattr(module, "distribution", distribution_twice)
  jax.clear_caches()
  scored = of_setting("rounds", sampling, num_draft_tokens=12_000, seed=1)
  jax.clear_caches()
  assert not rounds_row(scored, Setting(sampling, chain(3), 32), LEVEL).holds


# Ties.


def test_difference_is_a_tie_if_rounding_can_swap_two_logits():
  near = Divergence(0, 3, autoregressive=5, speculative=6, gap=1.9e-6, rounding=1e-6)
  assert near.is_tie and near._replace(gap=-1.9e-6).is_tie
  assert not any(near._replace(gap=gap).is_tie for gap in (2.1e-6, -2.1e-6, -12.0, math.inf))


def test_first_difference_is_located():
  pair = tiny_pair.pair()
  prompt = pair.prompt(TEXTS)
  keys = jax.random.split(jax.random.key(0), len(TEXTS))
  plain = np.asarray(pair.decode_fn(GREEDY, chain(0))(prompt, keys, max_new_tokens=9).tokens)
  other = plain.copy()
  other[2, 4:] = (plain[2, 4:] + 1) % 60
  (found,) = first_divergences(
    *(pair.target.model, pair.target.params, prompt, plain, other, GAMMA + 1, Rounding(1e-3))
  )
  assert (found.row, found.position, found.autoregressive, found.speculative) == (
    *(2, 4),
    *(plain[2, 4], other[2, 4]),
  )
  assert found.gap > 0.001 > 1e-4 > found.rounding and not found.is_tie


@pytest.mark.parametrize("tree", [TREE, DynamicTree(6, 3)], ids=str)
def test_changed_logits_of_later_nodes_are_not_rounding(tree):
  """For each tree the differences exceed the bound, and the changed outputs are not ties."""
  good, bad = tiny_pair.pair(), with_target(adds_a_sine)
  prompt, keys = good.prompt(TEXTS), jax.random.split(jax.random.key(0), len(TEXTS))
  plain = good.decode_fn(GREEDY, chain(0))
  own = plain(prompt, keys, max_new_tokens=12)
  text, lengths = np.asarray(own.tokens), np.asarray(own.lengths)
  moved = [node_moves(pair, prompt, text, lengths, tree) for pair in (good, bad)]
  assert moved[0][1] <= share_of(good) <= 1e-3 < 0.02 < moved[1][1]
  # Even a bound that is measured alone must not classify them as ties.
  rounding = Rounding(1e-3, measured=moved[1][0])
  settings, speculative = DecodeSettings(GREEDY, 4, 12), bad.decode_fn(GREEDY, tree)
  parted = compare_argmax(bad, TEXTS, plain, speculative, tree.num_nodes, settings, rounding)
  assert parted and not any(d.is_tie for _, d in parted)


def adds_a_sine(model, params, cache, tokens, tree=None, first=0):
  """Change the logits of the later nodes of a block."""
  logits, *more = model.extend(params, cache, tokens, tree, first)
  later = (jnp.arange(tokens.shape[1]) >= 2)[:, None]
  return logits + 3 * jnp.sin(jnp.arange(logits.shape[-1])) * later, *more


def test_wrong_position_of_node_3_is_not_rounding(monkeypatch):
  """Relative positions enter through the attention bias, so the test shifts the bias."""
  pair, tree = tiny_pair.pair(), chain(4)
  real = RelativePositionBias.__call__

  def off(self, query_positions, key_positions):
    if not self.bidirectional and query_positions.shape[1] == tree.num_nodes:
      query_positions = query_positions.at[:, 3].add(1)
    return real(self, query_positions, key_positions)

  monkeypatch.setattr(RelativePositionBias, "__call__", off)
  bad = with_target(lambda model, *block: model.extend(*block))
  text = np.asarray(pair.prompt(TEXTS))[:, :12]
  _, share = node_moves(bad, pair.prompt(TEXTS), text, np.full(len(TEXTS), 12), tree)
  assert share > 0.01


def test_rounding_bound_depends_on_the_dtype():
  def share(pair, **changes):
    model = pair.target.model
    config = model.config.with_layout(**changes)
    return share_of(tiny_pair.changed(pair, model=dataclasses.replace(model, config=config)))

  pair = tiny_pair.pair()
  assert share(pair, kernels="xla") == 1e-3
  assert share(pair, kernels="xla", dtype=jnp.bfloat16) == 0.03
  assert share(pair, kernels="skinny") == 0
  assert share(tiny_pair.gpt_pair(), kernels="skinny") == 1e-3


# Paths.


def test_dynamic_tree_is_checked_in_several_shapes_on_every_path():
  tree = DynamicTree(7, 3)
  shapes = shapes_of(tree)
  assert len({shape.parents for shape in shapes}) > 1
  assert all(shape.num_draft_tokens == 7 and shape.depth == 3 for shape in shapes)
  plans = plans_of(tree)
  for parents, depths, offsets, paths, length in zip(*plans):
    on_path = np.flatnonzero(offsets == 0) + 1
    assert paths[0][:length].tolist() == on_path.tolist() and depths[on_path[-1] - 1] == length
    siblings = [*zip(parents.tolist(), offsets.tolist())]
    assert len({*siblings}) == len(siblings)  # the children of a node are different tokens


# Tokens of outputs.


def test_windows_begin_where_rounds_begin():
  """Tokens are numbered from 0; rounds begin at tokens 0, 1, 4 and 6, and the text has 7 tokens."""
  result = DecodeResult(
    *(np.zeros((1, 9)), np.array([7]), rounds_of(1, 3, 2, 1), 4, np.array([-1])),
  )
  found = texts._in_windows(result, 3, np.arange(9)[None] + 1)
  assert found.tolist() == [[1, 2, 3], [5, 6, 7]]
  assert texts._in_windows(result, 4, np.arange(9)[None] + 1).tolist() == [
    [1, 2, 3, 4],
    [5, 6, 7, 0],
  ]


def rounds_of(*num_emitted):
  none = np.zeros(len(num_emitted))
  return Rounds(none, none, none, np.array(num_emitted)[:, None])


def test_scores_against_the_draft_have_mean_0_and_the_stated_variance():
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.full(7, 0.5), (2, 5))
  p, q = (np.broadcast_to(x[:, None], (5, 7, 7)) for x in (p, q))  # [rows, tokens, V]
  every = np.broadcast_to(np.arange(7), (5, 7))
  score, variance = map(np.asarray, texts._draft_scores(p, q, every))
  np.testing.assert_allclose((p[:, 0] * score).sum(axis=1), 0, atol=1e-6)
  np.testing.assert_allclose((p[:, 0] * score**2).sum(axis=1), variance[:, 0], atol=1e-6)
  assert np.abs(score).max() <= texts.MAX_RATIO
  np.testing.assert_array_equal(np.argsort(score[0]), np.argsort(np.minimum(q / p, 2)[0, 0]))


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.9}])
def test_distributions_of_the_checker_are_those_of_sampling(settings):
  sampling = Sampling(temperature=0.7, **settings)
  logits = np.random.default_rng(0).normal(0, 3, (4, 6, 30)).astype(np.float32)
  model = Fixed()
  found = target_probs(model, logits, logits[..., 0], np.zeros((4, 6), int), sampling, 6, ())
  np.testing.assert_allclose(found, tiny.adjusted(logits, 0.7, **settings), atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Model whose logits are its parameters."""

  def prompt_tokens(self, prompt):
    return jnp.zeros((len(prompt), 1), jnp.int32), jnp.ones(len(prompt), jnp.int32)

  def prefill(self, params, prompt, num_slots):
    return None, None

  def extend(self, params, cache, tokens):
    return params, None, cache


# The command.


def check(**changes):
  settings = dict(
    texts=TEXTS,
    samplings=[GREEDY, Sampling(top_k=10)],
    gammas=[GAMMA],
    batch_sizes=[4],
    max_new_tokens=12,
    num_tokens=400,
    num_draft_tokens=200,
    num_rounds=512,
    trees=(),
    dynamic=(),
    long_tokens=0,
  )
  check_exactness(changes.pop("pair", tiny_pair.pair()), **{**settings, **changes})


def report(capsys):
  """Return the rows of the printed table, with the cells in a row, and the lines below it."""
  said = capsys.readouterr().out.splitlines()
  start = next(i for i, line in enumerate(said) if line.split()[:2] == ["check", "setting"])
  rows = [re.split(r" {2,}", line) for line in said[start + 1 :] if not line.startswith(" ")]
  return [row for row in rows if len(row) > 1], [row[0] for row in rows if len(row) == 1]


def test_long_texts_of_the_check_use_all_positions():
  """Sources of an encoder-decoder do not count."""
  words = tiny_pair.pair().vocabulary
  config = tiny.config(len(words), layers=1, **tiny.BART)  # 64 positions
  model = config, tiny_pair.random_params(config, 0)
  for pair, most in (
    (load_pair(model, vocabulary=words), 64),
    (tiny_pair.gpt_pair(), 97 - len(tiny_pair.gpt_pair().encode(TEXTS[0]))),
    (tiny_pair.pair(), 160),
  ):
    checker = Checker(pair, TEXTS[:1], [chain(5)], 1, 12, 160, None)
    assert checker.long_tokens == most


@pytest.mark.parametrize(
  "variance, words", [(1e3, r"2\d\.\d% of tokens"), (1.0, r"none \(too few")]
)
def test_share_of_tokens_above_all_is_not_stated(variance, words):
  scores = TextScores({"draft": (np.zeros((1, 1)), np.full((1, 1), variance), 2.0)}, 1, 0)
  assert re.search(f"; detects {words}", samples_row([scores], "", LEVEL).details)
  assert re.search(f": outputs, {words}", detectable_errors([], LEVEL, [scores], LEVEL))


def test_correct_pair_passes(capsys):
  check(long_tokens=40)
  rows, notes = report(capsys)
  assert [row[0] for row in rows] == ["ok"] * 16
  assert notes[0].startswith(
    "Smallest errors that are detected nine times in ten: the verifier alo"
  )
  assert notes[1:] == ["16 of 16 checks hold, in float32 on cpu."]
  setting = "temperature 1 top-k 10, gamma 2"
  alone = "verifier alone"
  assert [row[1:3] for row in rows] == [
    [alone, "temperature 0, gamma 3"],
    [alone, "temperature 1 top-k 3, gamma 3"],
    ["draft with verifier", setting],
    ["logits", "gamma 2"],
    ["rounds", f"{setting}, batch 32"],
    ["rounds", f"{setting}, long texts, batch 8"],
    *(
      [check, "all rounds"]
      for check in (
        "acceptance",
        "draft tokens",
        "next tokens",
        "independence within rounds",
        "independence between rounds",
      )
    ),
    ["outputs", "temperature 0, gamma 2, batch 4"],
    ["outputs", "temperature 0, gamma 2, long texts, batch 4"],
    ["samples", f"{setting}, batch 4"],
    ["samples", "temperature 1 top-k 10, autoregressive, batch 4"],
    ["samples", "all settings"],
  ]
  found = {check: row for _, check, *row in rows}
  assert "too few draft tokens to detect a bias" in found["acceptance"][-1]
  assert "detects a temperature wrong by" in found["next tokens"][-1]
  assert found["independence between rounds"][-1].startswith("119 correlations")
  assert found["outputs"][1] == "4 of 4" and "40 tokens each" in found["outputs"][-1]
  assert "of tokens taken from the draft's distribution" in found["samples"][-1]
  assert float(found["samples"][1].removeprefix("p = ")) > 1e-3


def test_trees_are_checked_and_a_verifier_without_scored_rounds_is_named(
  capsys, few_rounds_on_tables
):
  pair = dataclasses.replace(tiny_pair.pair(), verifier=BlockVerifier)
  check(pair=pair, gammas=(), trees=[(0, 0, 1)])
  rows, notes = report(capsys)
  checks = *["verifier alone"] * 2, "draft with verifier", "logits", "outputs", *["samples"] * 3
  assert [row[:2] for row in rows] == [["ok", check] for check in checks]
  assert rows[5][2] == "temperature 1 top-k 10, tree (0, 0, 1), batch 4"
  assert notes[0] == "For BlockVerifier, rounds were checked on tables only."


def test_dynamic_trees_are_checked_without_their_rounds(capsys, few_rounds_on_tables):
  check(gammas=(), dynamic=[(5, 2)])
  rows, notes = report(capsys)
  assert rows[4][:4] == ["ok", "outputs", "temperature 0, dynamic tree 5/2, batch 4", "4 of 4"]
  assert len(rows) == 8 and {row[0] for row in rows} == {"ok"}
  assert notes[0] == "For dynamic trees, rounds were checked on tables only."


def test_fault_is_printed_and_exits_with_status_1(capsys, few_rounds_on_tables):
  def forgets_top_k(sampling):
    return TokenVerifier(Sampling(sampling.temperature))

  forgets_top_k.__name__ = "TokenVerifier"  # the verifier by which its rounds are scored
  with pytest.raises(SystemExit) as ended:
    check(
      pair=dataclasses.replace(tiny_pair.pair(), verifier=forgets_top_k),
      samplings=[Sampling(top_k=10)],
    )
  assert ended.value.code == 1
  row = next(row for row in report(capsys)[0] if row[1] == "samples")
  assert row[:4] == ["FAIL", "samples", "temperature 1 top-k 10, gamma 2, batch 4", "p = 0"]
  assert "outputs impossible" in row[-1]


def test_correct_pair_with_processors_passes(capsys, few_rounds_on_tables):
  generation = GenerationConfig(
    repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=3, forced_eos_token_id=1
  )
  check(samplings=[Sampling()], gammas=(), trees=[(0, 0, 1)], generation=generation)
  said = capsys.readouterr().out
  assert "Logits processors: RepetitionPenalty, NoRepeatNgram, MinLength, ForcedTokens." in said
  assert "FAIL" not in said and said.count("\nok  ") == 12


@pytest.mark.parametrize("fault, temperature", [(FAULTS[0], 1.0), (FAULTS[1], 0.0)])
def test_wrong_text_of_processors_is_a_fault(
  fault, temperature, monkeypatch, capsys, few_rounds_on_tables
):
  def of_last_token(logits, tokens, length):
    phase = 3.0 * tokens[length - 1] + length
    return logits + 3 * jnp.sin(phase * (1 + jnp.arange(len(logits))))

  monkeypatch.setattr(decode, "node_prefixes", fault)
  generation = GenerationConfig(logits_processor=of_last_token, min_new_tokens=12)
  settings = dict(samplings=[Sampling(temperature)], gammas=(), trees=[(0, 0, 2, 2)])
  settings |= dict(num_tokens=4_000, num_draft_tokens=4_000)  # as in a default run
  with pytest.raises(SystemExit) as ended:
    check(pair=tiny_pair.pair("random"), generation=generation, **settings)
  assert ended.value.code == 1 and "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"texts": []}, "nothing to check"),
    ({"gammas": []}, "nothing to check"),
    ({"dynamic": [(1, 2)]}, "number of a tree's draft tokens is 0"),
    ({"trees": [()]}, "number of a tree's draft tokens is 0"),
    ({"trees": [(1,)]}, "level order"),
    (
      {"pair": dataclasses.replace(tiny_pair.pair(), verifier=TypicalVerifier)},
      "TypicalVerifier is lossy",
    ),
    ({"level": 0.0}, "level is 0.0"),
    ({"num_tokens": 0}, "num_tokens is 0"),
    ({"batch_sizes": [0]}, "batch_size is 0"),
    ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ({"long_tokens": -1}, "long_tokens is -1"),
    (
      {"generation": GenerationConfig(num_beams=2)},
      "generation has num_beams, which a check does not",
    ),
    ({"pair": simulated(tiny_pair.pair())}, "acceptance is simulated"),
  ],
)
def test_invalid_input_raises(changes, words):
  with pytest.raises(InputError, match=words):
    check(**changes)
