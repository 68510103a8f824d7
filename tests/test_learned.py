"""Test that learned heads compute the same in training and decoding, and can be used as drafts."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from test_contract import (
  GREEDY,
  LIMIT,
  RAGGED,
  RANDOM,
  T5_CONFIG,
  V,
  deep,
  deep_features,
  deep_gpt,
  gpt,
  t5,
  t5gemma,
  with_positions,
)

from specdec_jax import load as loading
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.commands import teacher
from specdec_jax.commands import train as commands
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import distribution
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Outcome, Params, Verification
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.drafts import composed
from specdec_jax.drafts.heads import DraftHead, new_head
from specdec_jax.drafts.heads.base import TargetOutputs
from specdec_jax.errors import InputError
from specdec_jax.measure.alpha import proposals
from specdec_jax.models.families import module_of, with_feature_layers
from specdec_jax.models.layers import norm
from specdec_jax.random_models import random_speculator
from specdec_jax.registry import HEADS
from specdec_jax.train.batches import PADDING, Batch
from specdec_jax.train.objectives import divergences
from specdec_jax.train.speculators import speculator_objective, warm_start
from specdec_jax.train.trainer import TrainSettings

pytestmark = pytest.mark.slow

LOGITS = np.array([[2.0, 0.5, -1.0, 0.3], [0.0, 0.0, 3.0, 1.0]], np.float32)
P = np.array([[0.7, 0.2, 0.06, 0.04], [0.1, 0.2, 0.3, 0.4]])
Q = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
BETA = np.minimum(P, Q).sum(axis=1)


def kl(p, q):
  return (p * np.log(p / q)).sum(axis=1)


@pytest.mark.parametrize(
  "divergence, progress, want",
  [
    ("forward_kl", 0.3, kl(P, Q)),
    ("reverse_kl", 0.3, kl(Q, P)),
    ("jsd", 0.3, (kl(P, (P + Q) / 2) + kl(Q, (P + Q) / 2)) / 2),
    ("tv", 0.3, np.abs(P - Q).sum(axis=1) / 2),
    ("lk", 0.0, kl(P, Q)),
    ("lk", 1.0, -np.log(BETA)),
    ("lk", 0.25, -0.25 * np.log(BETA) + 0.75 * kl(P, Q)),
  ],
)
def test_divergences_are_exact_if_all_of_p_is_known_and_otherwise_lower_bounds(
  divergence, progress, want
):
  """Three of four probabilities determine the fourth; with two known, the other two are merged."""
  tokens = np.array([[1, 0, 3], [3, 2, 0]])
  probs = np.take_along_axis(P, tokens, axis=1)
  exact = divergences(jnp.asarray(LOGITS), tokens, probs, divergence, progress)
  np.testing.assert_allclose(exact, want, rtol=1e-5)
  bound = divergences(jnp.asarray(LOGITS), tokens[:, :2], probs[:, :2], divergence, progress)
  assert (np.asarray(bound) <= want + 1e-6).all()


def tiny_head(target, kind: str, gamma: int = 3, **settings) -> DraftHead:
  sizes = dict(emb_dim=8, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1, rank=4)
  return new_head(target, kind, gamma=gamma, offsets=gamma, **sizes | settings)


@pytest.mark.parametrize(
  "kind, of, layers",
  [
    *((kind, t5, None) for kind in HEADS),
    ("heads", gpt, None),
    ("early_exit", deep_gpt, (0, 2)),
    ("features", deep_features, (0, 2)),
    ("features", t5gemma, None),
  ],
)
def test_training_logits_equal_those_of_decoding(kind, of, layers):
  """At each token of a text, the draft's q in decoding equals the q that the training loss uses."""
  models = of()
  shape = models.target.config
  config = tiny_head(shape, kind, layers=layers)
  own = tiny_pair.random_params(config, 3)
  drafter = loading.head_draft(kind, config, own, tiny.loaded(None, models.target, models.params))
  first = kind == "pass"  # its first draft token is the target's
  prompts = models.prompts
  if not shape.has_encoder:  # it trains on texts of its own
    prompts = np.where(np.arange(prompts.shape[1]) == 0, 1, np.zeros_like(prompts))
  tokens = np.random.default_rng(1).integers(2, V, (len(prompts), 6)).astype(np.int32)
  draft, params = drafter.build(RANDOM, chain(1 + first)), Params(models.params, drafter.params)
  q = np.asarray(proposals(models.target, draft, params, prompts, tokens)[1])[:, :, int(first)]
  batch = Batch(prompts, tokens, tokens[..., None], np.ones((*tokens.shape, 1), np.float32))
  objective = speculator_objective(config, shape, models.params, "tv", stride=1, decay=1e-6)
  loss = jax.jit(objective.scores)(own, models.params, batch)["valid_loss"]
  own_chance = np.take_along_axis(q, tokens[..., None], axis=2)[..., 0]
  if first:  # one anchor per text, in its middle; the second token is one position later
    own_chance = np.take_along_axis(q[:, 2], tokens[:, 3:4], axis=1)
  np.testing.assert_allclose(loss, 1 - own_chance.mean(), rtol=2e-4)


@pytest.mark.parametrize(
  "kind, tree",
  [
    ("conditioned", RAGGED),
    ("features", chain(4)),
  ],
  ids=["conditioned, tree", "features, chain"],
)
def test_decoder_drafts_as_it_was_trained(kind, tree):
  """The q of each draft token equals the training probability, given the target's hidden states.

  Rounds accept some, all or none of the draft tokens.
  """
  models = t5()
  config = tiny_head(models.target.config, kind)
  own, drawn = tiny_pair.random_params(config, 3), np.random.default_rng(0)
  draft = loading.head_draft(
    "", config, own, tiny.loaded(None, models.target, models.params)
  ).build(RANDOM, tree)
  batch, num_slots, length, anchors = len(models.prompts), 24, 1, []
  states = drawn.normal(size=(batch, num_slots, config.state_dim)).astype(np.float32)
  tokens = np.zeros((batch, num_slots), np.int32)
  hidden, cache = models.target.prefill(models.params, jnp.asarray(models.prompts), num_slots)
  context = Context(models.prompts, tokens, jnp.full(batch, length), cache, states[:, 0])
  state = draft.init(own, context, hidden)
  of_head = jax.jit(functools.partial(config.module.apply, method="after_each"))

  def eagle(variables, inputs, hidden, rounds, *source):
    """Return logits where each token of the last round has its parent's predicted feature."""
    last_committed = rounds[0, -1]
    for position in range(last_committed + 1, last_committed + 1 + tree.depth):
      _, features = of_head(variables, inputs, hidden, rounds, *source)
      hidden = np.concatenate(
        [hidden[:, :position], features[:, position - 1, None], hidden[:, position + 1 :]], axis=1
      )
    return of_head(variables, inputs, hidden, rounds, *source)[0]

  learned = eagle if kind == "eagle_text" else of_head
  paths = [np.flatnonzero(ancestors)[1:] for ancestors in tree.ancestors]  # to each node
  for keep in (2, tree.num_draft_tokens, 0, 3):
    anchors = anchors[: length - 1] + [length - 1] * (num_slots - length + 1)
    here = dict(tokens=tokens, length=jnp.full(batch, length), hidden=states[:, length - 1])
    keys = jax.random.split(jax.random.key(keep), batch)
    proposal, state = jax.jit(draft.propose)(own, state, context._replace(**here), keys)
    draft_tokens, last = np.asarray(proposal.tokens), cache.cross[-1:]
    for node in range(1, tree.num_nodes):
      inputs = tokens.copy()
      inputs[:, length : length + len(paths[node])] = draft_tokens[:, paths[node] - 1]
      rounds = np.broadcast_to(np.array(anchors), inputs.shape)
      logits = learned({"params": own}, inputs, states, rounds, last, cache.cross_bias)
      q = distribution(logits[:, length + len(paths[node]) - 2], RANDOM)
      if not tree.ranks[node - 1]:  # a sibling has the q that excludes its earlier siblings
        np.testing.assert_allclose(proposal.q[:, node - 1], q, atol=2e-6)
    path = paths[keep]
    tokens[:, length : length + len(path)] = draft_tokens[:, path - 1]
    tokens[:, length + len(path)] = drawn.integers(2, V, batch)
    length += len(path) + 1
    padded = np.pad(path, (0, tree.depth - len(path)))
    kept = None if tree.is_chain else jnp.tile(padded, (batch, 1))
    verification = Verification(jnp.full(batch, len(path)), tokens[:, length - 1], kept)
    lengths = jnp.full(batch, length)
    seen = jnp.asarray(states[:, length - len(path) - 1 + np.asarray(tree.depths)])
    emitted = jnp.full(batch, len(path) + 1)
    state = draft.observe(own, state, Outcome(proposal, None, seen, verification, emitted, lengths))


@pytest.mark.parametrize("layers", [(), (0, 5), (1, 0), (0, 0), (-1,)], ids=str)
def test_layers_that_the_target_lacks_are_rejected(layers):
  target = deep().target.config
  with pytest.raises(InputError, match="the target's decoder has layers 0 to 2: give some of them"):
    new_head(target, "early_exit", layers=layers)
  if layers:
    with pytest.raises(InputError, match="layers 0 to 2"):
      new_head(target, "features", layers=layers)


def test_settings_of_other_kinds_are_left_out_and_unknown_ones_are_named():
  target = deep().target.config
  assert new_head(target, "heads", rank=3, layers=None, gamma=2) == new_head(
    target, "heads", gamma=2
  )
  with pytest.raises(TypeError, match="No kind of head has ranks"):
    new_head(target, "parallel", ranks=3)
  with pytest.raises(InputError, match="must be one of 'heads', 'eagle'"):
    new_head(target, "medusa")


@pytest.mark.parametrize("make", [deep, deep_gpt], ids=["T5", "GPT"])
def test_hidden_states_are_outputs_of_feature_layers(make):
  """The output of the last layer, normalized, is the state that the target has without them."""
  models = make()
  last = models.target.config.num_decoder_layers - 1
  fused = with_feature_layers(models.target, (0, last))
  tokens = jnp.asarray(models.prompts[:, :4])

  def states(target, params):
    start, cache = target.prefill(params, jnp.asarray(models.prompts), 32)
    return start, target.extend(params, cache, tokens)[:2]

  start, (logits, hidden) = jax.jit(functools.partial(states, fused))(models.params)
  expected_start, (expected_logits, expected) = jax.jit(functools.partial(states, models.target))(
    models.params
  )
  width = models.target.config.emb_dim
  assert start.shape[-1] == hidden.shape[-1] == 2 * width and expected_start.shape[-1] == width
  np.testing.assert_array_equal(logits, expected_logits)
  normalize = functools.partial(norm(models.target.config).apply)
  scale = {"params": models.params["decoder"]["decoder_norm"]}
  np.testing.assert_allclose(normalize(scale, hidden[..., width:]), expected, rtol=1e-5, atol=1e-6)
  assert not np.allclose(normalize(scale, hidden[..., :width]), expected, atol=1e-2)


def test_pair_gives_each_draft_the_states_that_it_reads():
  pair = tiny_pair.pair()
  layers = (0,)
  head = functools.partial(new_head, kind="features", layers=layers, emb_dim=8)
  load = functools.partial(random_speculator, head=head)
  tree = functools.partial(composed.tree_draft, draft=load, widths=(2,))
  with_tree = pair.with_draft(tree(pair.target))
  assert with_tree.target.model.feature_layers == with_tree.draft.features == layers
  assert with_tree.with_draft(pair.draft).target.model.feature_layers == ()
  with pytest.raises(InputError, match="cannot be joined with another draft"):
    composed.forest_draft(pair.target, [load, load])


def test_chosen_layers_are_stored(tmp_path):
  head = new_head(deep().target.config, "early_exit", layers=(0, 2))
  save_model(str(tmp_path), head, tiny_pair.random_params(head, 0))
  assert open_checkpoint(str(tmp_path)).config == head and head.layers == (0, 2)


def random_head(kind: str):
  return tiny_pair.random_params(tiny_head(T5_CONFIG, kind), 0)


def test_feature_loss_is_zero_for_the_targets_features_and_ignores_padding():
  models, drawn = t5(), np.random.default_rng(0)
  head = tiny_head(models.target.config, "eagle_text")
  own = tiny_pair.random_params(head, 0)
  _, cache = models.target.prefill(models.params, jnp.asarray(models.prompts), 8)
  inputs = jnp.asarray(drawn.integers(2, V, (len(models.prompts), 5)))
  shape = (*inputs.shape, head.state_dim)
  hidden = jnp.asarray(drawn.normal(size=shape), jnp.float32)
  rest = dict(cache=cache, rng=None, source=models.prompts, progress=0.0)

  for position in range(1, 5):  # a predicted state depends on the states up to its input
    outputs = TargetOutputs(inputs, hidden, targets=inputs, **rest)
    predicted = head.after_each(own, outputs, inputs)[1]
    hidden = hidden.at[:, position].set(predicted[:, position - 1])

  def loss(targets, change=0.0):
    outputs = TargetOutputs(inputs, hidden.at[:, -1].add(change), targets=targets, **rest)
    return float(head.training_logits(own, models.target.config, models.params, outputs, 1).loss)

  assert loss(inputs) < 1e-9
  assert loss(inputs, 0.5) == pytest.approx(0.5**2 / 2 / 4, rel=1e-3)
  assert loss(inputs.at[:, -2:].set(PADDING), 0.5) < 1e-9


@pytest.mark.parametrize("kind", ["eagle", "drafter"])
def test_texts_that_are_too_short_for_an_anchor_count_nothing(kind):
  """Texts of one token and EOS, whose anchors at stride 4 may all be after their end."""
  models = t5()
  head = tiny_head(models.target.config, kind)
  targets = np.full((len(models.prompts), 8), PADDING)
  targets[:, :2] = 3, 1
  labels = np.maximum(targets, 0)[..., None]
  batch = Batch(models.prompts, targets, labels, (targets != PADDING)[..., None] + 0.0)
  objective = speculator_objective(head, models.target.config, models.params, stride=4)
  step = jax.jit(jax.value_and_grad(objective.loss))
  own, losses = tiny_pair.random_params(head, 0), []
  for seed in range(8):
    loss, gradient = step(own, models.params, batch, jax.random.key(seed), 0.0)
    losses.append(float(loss))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
  assert 0.0 in losses and max(losses) > 0


@pytest.mark.parametrize("kind", ["pass", "drafter"])
def test_heads_are_trained_on_texts_of_all_positions(kind):
  """The loss equals that of a target with more positions, which some heads' slots would need."""
  losses = []
  for count in (64, 10):
    models = with_positions(t5(), count)
    head = tiny_head(models.target.config, kind)
    targets = np.random.default_rng(0).integers(2, V, (len(models.prompts), 10))
    weights = np.ones((*targets.shape, 1), np.float32)
    batch = Batch(models.prompts, targets, targets[..., None], weights)
    objective = speculator_objective(head, models.target.config, models.params, stride=2)
    own, rng = tiny_pair.random_params(head, 0), jax.random.key(0)
    losses.append(float(objective.loss(own, models.params, batch, rng, 0.0)))
  assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("too_long", ["train.txt", "valid.txt"])
def test_texts_longer_than_the_positions_raise_at_once(tmp_path, monkeypatch, too_long):
  monkeypatch.setattr(teacher, "decode", lambda *args: pytest.fail("decodes texts"))
  words = open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))
  config = tiny.config(len(words), layers=1, **tiny.BART | dict(num_positions=16))
  save_model(str(tmp_path / "target"), config, tiny_pair.random_params(config, 0))
  for name in ("train.txt", "valid.txt"):
    (tmp_path / name).write_text("a man\n" + "a man runs by the sea.\n" * (name == too_long))
  with pytest.raises(InputError, match=f"{too_long} has 18 tokens, and the model has 16 pos"):
    commands.train_speculator(
      data=str(tmp_path),
      sources=["train.txt"],
      targets=["train.txt"],
      valid_source="valid.txt",
      head=functools.partial(new_head, gamma=4, emb_dim=32, mlp_dim=32, num_decoder_layers=1),
      settings=TrainSettings(),
      vocabulary=words.path,
      target=str(tmp_path / "target"),
      output=str(tmp_path / "speculator"),
      work_dir=str(tmp_path / "work"),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_warm_start_takes_the_parameters_of_a_model_that_fit(tied):
  """The logits of the model are tied to its embeddings, or have a separate matrix."""
  model = dataclasses.replace(T5_CONFIG, emb_dim=8, tied_logits=tied)
  params = tiny_pair.random_params(model, 1)
  params["decoder"]["decoder_norm"]["scale"] *= 3
  hidden = jax.random.normal(jax.random.key(2), (3, 8))
  embedding = params["token_embedder"]["embedding"]
  logits = functools.partial(module_of(model).apply, {"params": params}, method="logits")
  eagle, decoder = (
    warm_start(random_head(kind), model, params) for kind in ("eagle", "shared_encoder")
  )
  kernel = eagle["logits_dense"]["kernel"]
  np.testing.assert_allclose(hidden @ kernel, logits(3 * hidden), rtol=1e-4, atol=1e-5)
  unit_variance = embedding / embedding.std()
  np.testing.assert_allclose(eagle["token_embedder"]["embedding"], unit_variance, rtol=1e-5)
  kernel = decoder["decoder"]["logits_dense"]["kernel"]
  np.testing.assert_allclose(hidden @ kernel, logits(hidden), rtol=1e-4, atol=1e-5)
  for name in ("decoder_norm", "relpos_bias"):
    jax.tree.map(np.testing.assert_array_equal, decoder["decoder"][name], params["decoder"][name])
  np.testing.assert_array_equal(decoder["token_embedder"]["embedding"], embedding)
  for kind, config in (("heads", model), ("eagle", T5_CONFIG)):
    other_params = tiny_pair.random_params(config, 1)
    with pytest.raises(InputError, match="of the same vocabulary and of the draft's emb_dim"):
      warm_start(random_head(kind), config, other_params)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Folder with a learned draft of the tiny pair, trained for 6 epochs on the target's outputs."""
  path = tmp_path_factory.mktemp("learned")
  texts = tiny_pair.SENTENCES[::9]
  for name in ("train.en", "train.de", "val.en"):
    (path / name).write_text("".join(line + "\n" for line in texts))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specdec_jax.train.batches.BUCKETS", (96,))
    commands.train_speculator(
      data=str(path),
      sources=["train.en"],
      targets=["train.de"],
      valid_source="val.en",
      head=functools.partial(new_head, gamma=4, emb_dim=32, mlp_dim=32, num_decoder_layers=1),
      settings=TrainSettings(epochs=6, tokens_per_batch=768, warmup_steps=5, label_smoothing=0.0),
      vocabulary=str(tiny_pair.folder() / "vocabulary.model"),
      target=str(tiny_pair.folder() / "target"),
      output=str(path / "speculator"),
      work_dir=str(path / "work"),
      samples=1,
      divergence="lk",
      stride=2,
    )
  return path


def load(path):
  folder = tiny_pair.folder()
  return loading.load_pair(
    target=str(folder / "target"),
    draft=str(path / "speculator"),
    vocabulary=str(folder / "vocabulary.model"),
    max_source_tokens=24,
  )


def test_trained_head_is_loaded_as_a_draft_and_its_score_has_improved(trained):
  lines = (trained / "work/metrics.jsonl").read_text().splitlines()
  lengths = [json.loads(line)["valid_acceptance_length"] for line in lines]
  assert len(lengths) == 6 and lengths[-1] > lengths[0]
  pair = load(trained)
  assert pair.draft.name == "speculator"
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:4]), jax.random.split(jax.random.key(0), 4)
  plain = pair.decode_fn(GREEDY, chain(0))(prompt, keys, max_new_tokens=LIMIT)
  ours = pair.decode_fn(GREEDY, chain(4))(prompt, keys, max_new_tokens=LIMIT)
  np.testing.assert_array_equal(ours.tokens, plain.tokens)
  with pytest.raises(InputError, match="at most 4 consecutive draft tokens"):
    pair.draft.build(GREEDY, chain(5))


@pytest.mark.parametrize("kind", HEADS)
def test_each_kind_is_loaded_from_its_folder(kind, tmp_path):
  """A loaded head has the default shape of its kind and proposes the tokens of the saved head."""
  models = t5()
  config = new_head(models.target.config, kind)

  def stored(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)

  own = jax.tree.map(stored, tiny_pair.random_params(config, 0))
  save_model(str(tmp_path), config, own)
  words = open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))
  loaded = loading.speculator(tiny.loaded(words, models.target, models.params), str(tmp_path))
  mine = loading.head_draft(kind, config, own, tiny.loaded(None, models.target, models.params))
  jax.tree.map(np.testing.assert_array_equal, loaded.params, mine.params)
  if kind in ("eagle", "heads", "parallel"):  # trees as in measurements
    tree = composed.tree_draft(tiny.loaded(words), lambda target: mine, num_draft_tokens=15)
    shapes = [tree.build(GREEDY, chain(depth)).tree for depth in (1, 5)]
    assert [(shape.num_draft_tokens, shape.depth) for shape in shapes] == [(1, 1), (15, 5)]


def test_head_of_another_target_raises(trained):
  folder = tiny_pair.folder()
  words = dict(vocabulary=str(folder / "vocabulary.model"))
  with pytest.raises(InputError, match="lives on the states of a target"):
    loading.load_pair(target=str(trained / "speculator"), draft=str(folder / "near"), **words)
  as_draft = functools.partial(loading.speculator, path=str(folder / "near"))
  with pytest.raises(InputError, match="is a model by itself"):
    loading.load_pair(target=str(folder / "target"), draft=as_draft, **words)
  mine = functools.partial(loading.speculator, path=str(trained / "speculator"))
  with pytest.raises(InputError, match="give the target that it was trained on|this one"):
    loading.load_pair(target=str(folder / "random"), draft=mine, **words)


@pytest.mark.parametrize("kind", ["early_exit", "pass"])
def test_draft_that_reads_the_targets_cache_raises_in_beam_search(kind):
  folder = tiny_pair.folder()
  pair = loading.load_pair(
    *(str(folder / name) for name in ("target", "near", "vocabulary.model")), kernels="xla"
  )
  config = new_head(pair.target.model.config, kind)
  own = tiny_pair.random_params(config, 0)
  made = loading.head_draft(kind, config, own, pair.target)
  with pytest.raises(InputError, match="another draft"):
    pair.with_draft(made).generate(tiny_pair.SENTENCES[:1], num_beams=2, max_new_tokens=4)
