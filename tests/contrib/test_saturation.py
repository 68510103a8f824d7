"""Test early exit decided per token: which layers decide, and the caches of skipped layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_contract import deep, deep_gpt

from specdec_jax.contrib.saturation import saturation
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.drafts.layer_skip import cache_of_layers, layer_skip
from specdec_jax.errors import InputError

pytestmark = pytest.mark.slow


def logits_of(models, make, layers: list[int], *settings):
  """Return the logits of a draft with some layers, for a block of four tokens of three texts."""
  factory = make(tiny.loaded(None, models.target, models.params), layers, *settings)
  draft = factory.build(Sampling(), chain(2)).draft
  block = jnp.array([[0, 3, 2, 5], [4, 2, 2, 3], [5, 5, 3, 2]])

  def extend(params, prompts):
    _, cache = models.target.prefill(models.params, prompts, 12)
    cache = cache_of_layers(cache, layers)
    logits, _, cache = draft.model.extend(params, cache, block[:, :3])
    cache = draft.model.commit(cache, cache.length + 3)
    after, _, _ = draft.model.extend(params, cache, block[:, 3:])
    return jnp.concatenate([logits, after], axis=1)

  return np.asarray(jax.jit(extend)(factory.params, jnp.asarray(models.prompts[3:])))


def test_a_token_exits_after_the_first_layer_that_is_confident():
  """The second layer reads the same states of all tokens, so its logits do not depend on exits."""
  models = deep_gpt()
  first, second = (logits_of(models, layer_skip, layers) for layers in ([0], [0, 1]))
  confidence = jax.nn.softmax(first).max(axis=-1)
  threshold = float(np.sort(confidence, axis=None)[5:7].mean())  # half of the tokens exit
  exited = np.asarray(confidence >= threshold)
  want = np.where(exited[..., None], first, second)
  np.testing.assert_allclose(
    logits_of(models, saturation, [0, 1], threshold), want, rtol=1e-5, atol=1e-5
  )
  for limit, layers in ((0.0, [0]), (1.0, [0, 1, 2])):
    np.testing.assert_allclose(
      logits_of(models, saturation, [0, 1, 2], limit),
      logits_of(models, layer_skip, layers),
      rtol=1e-5,
      atol=1e-5,
    )


def test_a_token_exits_when_its_most_probable_token_is_unchanged():
  models = deep()
  exits = [logits_of(models, layer_skip, [*range(count)]) for count in (1, 2, 3)]
  unchanged = exits[0].argmax(axis=-1) == exits[1].argmax(axis=-1)
  assert 0 < unchanged.sum() < unchanged.size
  # No token exits before the second layer, so the third one reads the same states of all tokens.
  want = np.where(unchanged[..., None], exits[1], exits[2])
  got = logits_of(models, saturation, [0, 1, 2])
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_invalid_settings_are_rejected():
  models = deep()
  target = tiny.loaded(None, models.target, models.params)
  with pytest.raises(InputError, match="layers is"):
    saturation(target, [0, 3])
  with pytest.raises(InputError, match="threshold is 1.5"):
    saturation(target, [0, 1], 1.5)
