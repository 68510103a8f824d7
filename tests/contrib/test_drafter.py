"""Test that Spec-Drafter decodes as it was trained, and that training shows the right tokens."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from jax import Array
from test_contract import RAGGED, RANDOM, T5_CONFIG, V, t5
from test_learned import tiny_head

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import distribution
from specdec_jax.core.trees import DynamicTree, chain
from specdec_jax.core.types import DraftOptions
from specdec_jax.drafts.heads import DraftHead, new_head
from specdec_jax.drafts.heads.base import TargetOutputs
from specdec_jax.errors import InputError
from specdec_jax.train.batches import PADDING, Batch
from specdec_jax.train.objectives import divergences
from specdec_jax.train.speculators import speculator_objective, warm_start

pytestmark = pytest.mark.slow


class Case(NamedTuple):
  """A head with random parameters, and texts [B, T] that end with padding in some rows."""

  head: DraftHead
  params: Any
  source: np.ndarray
  targets: np.ndarray

  @property
  def inputs(self) -> np.ndarray:
    return np.pad(self.targets[:, :-1], ((0, 0), (1, 0)))

  def logits(self, anchors: np.ndarray, shown: np.ndarray | None = None) -> Array:
    arguments = self.source, self.inputs, anchors, shown
    apply = jax.jit(functools.partial(self.head.module.apply, method="after_anchors"))
    return apply({"params": self.params}, *arguments)


def case(gamma: int = 3, length: int = 12) -> Case:
  models = t5()
  head = tiny_head(models.target.config, "drafter", gamma, num_encoder_layers=2)
  targets = np.random.default_rng(0).integers(2, V, (6, length)).astype(np.int32)
  targets[2, 4:] = targets[4, -1:] = 0
  return Case(head, tiny_pair.random_params(head, 3), models.prompts, targets)


@pytest.mark.parametrize("tree", [chain(2), RAGGED], ids=["chain", "tree"])
def test_q_in_each_round_equals_that_of_training(tree):
  """Rounds commit one token, two, or as many as possible; one row is ahead of the others."""
  drafted, most, batch = case(gamma=4, length=16), tree.depth + 1, 6
  draft = drafted.head.draft(t5().target.config, RANDOM, tree, DraftOptions())
  num_slots, length = 17 + tree.num_nodes, np.ones(batch, np.int32)
  text = np.zeros((batch, num_slots), np.int32)
  text[:, 1:17] = drafted.targets
  source = jnp.asarray(drafted.source)
  context = Context(source, text, length, None, jnp.zeros((batch, 1)))
  state = draft.init(drafted.params, context, jnp.zeros((batch, 1, 0)))
  propose = jax.jit(draft.propose)
  for step in (0, 1, most, 1, most, 2):
    length = length + step
    length[0] += step == 1
    committed = np.where(np.arange(num_slots) < length[:, None], text, 1)
    keys = jax.random.split(jax.random.key(step), batch)
    context = context._replace(tokens=committed, length=length)
    proposal, state = propose(drafted.params, state, context, keys)
    q = distribution(drafted.logits(length[:, None] - 1)[:, 0], RANDOM)
    for node, depth in enumerate(tree.depths[1:]):
      if tree.is_chain or not tree.ranks[node]:  # other siblings exclude the tokens of earlier ones
        np.testing.assert_allclose(proposal.q[:, node], q[:, depth - 1], atol=2e-6)


def test_placeholders_see_the_text_to_their_anchor_and_each_other():
  drafted, anchors = case(), np.tile([2, 5], (6, 1))
  before = drafted.logits(anchors)

  def change(position: int) -> np.ndarray:
    """Return whether the logits of each placeholder change with the input at a position."""
    targets = drafted.targets.copy()
    targets[:, position - 1] = 2 + (targets[:, position - 1] - 1) % (V - 2)
    after = drafted._replace(targets=targets).logits(anchors)
    return np.abs(after - before).max(axis=(0, 3)) > 1e-6

  np.testing.assert_array_equal(change(2), [[True] * 3, [True] * 3])
  np.testing.assert_array_equal(change(3), [[False] * 3, [True] * 3])
  np.testing.assert_array_equal(change(6), [[False] * 3, [False] * 3])
  shown = np.full((6, 2, 3), -1)
  np.testing.assert_allclose(drafted.logits(anchors, shown), before, atol=1e-6)
  shown[:, 0, 1] = 3
  moved = np.abs(drafted.logits(anchors, shown) - before).max(axis=(0, 3)) > 1e-6
  np.testing.assert_array_equal(moved, [[True] * 3, [False] * 3])
  other_source = drafted._replace(source=np.roll(drafted.source, 1, axis=0))
  assert np.abs(other_source.logits(anchors) - before).max() > 1e-3


def test_glancing_shows_a_share_of_the_wrong_tokens_and_leaves_them_out_of_the_loss():
  """At stride 1 every token is an anchor, for any random key."""
  drafted, models = case(gamma=10, length=16), t5()
  length = drafted.targets.shape[1]
  texts = np.where(drafted.targets > 0, drafted.targets, PADDING)
  outputs = TargetOutputs(drafted.inputs, None, None, None, drafted.source, jnp.asarray(texts), 0.0)
  target = models.target.config

  @jax.jit
  def draft_logits(params, frozen, outputs):
    return drafted.head.training_logits(params, target, frozen, outputs, 1)[:2]

  first, positions = (np.array(x) for x in draft_logits(drafted.params, (), outputs))
  padded = np.pad(drafted.targets, ((0, 0), (0, 10)))
  targets = padded[np.arange(6)[:, None, None], positions]
  wrong = ((first.argmax(axis=-1) != targets) & (targets > 0)).sum(axis=-1)
  assert len(np.unique(wrong)) > 5
  batch = Batch(
    drafted.source,
    texts,
    drafted.targets[..., None],
    (drafted.targets[..., None] > 0).astype(np.float32),
  )
  objective = speculator_objective(
    drafted.head, models.target.config, models.params, stride=1, decay=0.9
  )
  loss_of = jax.jit(objective.loss)
  for progress, ratio in ((0.0, 0.5), (1.0, 0.3)):
    logits, kept = draft_logits(
      drafted.params, (), outputs._replace(progress=progress, rng=jax.random.key(0))
    )
    shown = (np.array(kept) == length) & (positions != length)
    np.testing.assert_array_equal(np.where(shown, positions, kept), positions)
    np.testing.assert_array_equal(shown.sum(axis=-1), np.round(np.float32(ratio) * wrong))
    assert (targets[shown] > 0).all()
    full = shown[targets[..., -1] > 0]  # anchors whose placeholders are all inside the text
    assert 0 < full.mean(axis=0).min() and full.mean(axis=0).max() < 1  # any token may be shown
    given = np.where(shown, targets, -1)
    np.testing.assert_allclose(logits, drafted.logits(positions[..., 0], given), atol=1e-5)

    loss = loss_of(drafted.params, models.params, batch, jax.random.key(0), progress)
    labels = targets[..., None]
    per_token = np.array(divergences(logits, labels, (labels > 0) + 0.0, "forward_kl"))
    weights = ((targets > 0) & ~shown) * 0.9 ** np.arange(10)
    assert float(loss) == pytest.approx((per_token * weights).sum() / weights.sum(), rel=1e-4)


def test_trees_that_the_head_cannot_propose_raise():
  head, target = case().head, t5().target.config
  with pytest.raises(InputError, match="at most 3 consecutive draft tokens"):
    head.draft(target, RANDOM, chain(4), DraftOptions())
  with pytest.raises(InputError, match="candidates"):
    head.draft(target, RANDOM, DynamicTree(500, 2), DraftOptions())


def test_warm_start_takes_every_layer_of_a_model_with_as_many_heads():
  model = dataclasses.replace(T5_CONFIG, num_heads=3, num_encoder_layers=2, num_decoder_layers=2)
  sizes = dict(emb_dim=model.emb_dim, mlp_dim=model.mlp_dim, num_encoder_layers=2)
  head = new_head(T5_CONFIG, "drafter", num_heads=3, **sizes)
  params, own = (tiny_pair.random_params(each, i) for i, each in enumerate((model, head)))
  started = warm_start(own, model, params)
  np.testing.assert_array_equal(started.pop("places"), own["places"])
  jax.tree.map(np.testing.assert_array_equal, started, params)


def test_head_that_does_not_fit_the_target_cannot_be_trained():
  too_many = T5_CONFIG.num_heads + 1
  with pytest.raises(InputError, match="use the target that it was trained on"):
    new_head(T5_CONFIG, "shared_encoder", num_heads=too_many)
  head = dataclasses.replace(new_head(T5_CONFIG, "shared_encoder"), num_heads=too_many)
  with pytest.raises(InputError, match="use the target that it was trained on"):
    speculator_objective(head, T5_CONFIG, t5().params)
