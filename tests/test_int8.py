"""Test models with int8 and int4 weights, and drafts that propose only some tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from specdec_jax import registry
from specdec_jax.checkpoints.checkpoint import param_shapes
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.drafts.heads import new_head
from specdec_jax.errors import InputError
from specdec_jax.load import checkpoint_draft, frequent_tokens, load_pair, speculator
from specdec_jax.measure.alpha import proposals
from specdec_jax.models.kernels import skinny
from specdec_jax.models.partitioning import make_mesh, param_shardings
from specdec_jax.models.quantization import quantize
from specdec_jax.registry import HEADS

pytestmark = pytest.mark.slow

GREEDY, RANDOM = Sampling(0.0), Sampling(1.0)
needs_kernels = pytest.mark.skipif(
  not skinny.is_available(), reason="needs a C++ compiler and a CPU, one device"
)
KERNELS = ["xla", "gpu", pytest.param("auto", marks=needs_kernels)]
TARGET_LOGITS = [kind for kind in HEADS if registry.head(kind).uses_target_logits]


def name_of(path) -> str:
  return "/".join(key.key for key in path)


def load(target="target", draft="near", **options):
  folder = tiny_pair.folder()
  names = (str(folder / name) for name in (target, draft, "vocabulary.model"))
  return load_pair(*names, max_source_tokens=24, **options)


def outputs() -> str:
  path = tiny_pair.folder() / "frequent.txt"
  path.write_text("".join(f"{line}\n" for line in tiny_pair.SENTENCES[:20]))
  return str(path)


def logits_of(pair):
  prompt, tokens = pair.prompt(tiny_pair.SENTENCES[:3]), jnp.asarray([[0, 5, 7, 9]] * 3)

  @jax.jit
  def logits(params):
    _, cache = pair.target.model.prefill(params, prompt, 8)
    return pair.target.model.extend(params, cache, tokens)[0]

  return np.asarray(logits(pair.target.params))


@pytest.mark.parametrize("value, weights", [(np.nan, "int8"), (np.inf, "int8"), (np.nan, "int4")])
def test_weights_that_integers_cannot_represent_are_rejected(tmp_path, value, weights):
  pair, path = load(kernels="xla"), str(tmp_path / "damaged")
  checkpoint = open_checkpoint(str(tiny_pair.folder() / "target"))
  params = checkpoint.load(checkpoint.config)
  kernel = params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"] = kernel.at[3, 2].set(value)
  save_model(path, checkpoint.config, params)
  with pytest.raises(
    InputError, match=f"decoder/layers_0/mlp/wo/kernel of .*damaged.*{weights} cannot"
  ):
    load_pair(path, path, pair.vocabulary, weights=weights)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_are_those_of_the_rounded_weights(kernels, weights):
  """All matrices of linear layers are rounded; embeddings, norms and biases do not change."""
  pair, whole = load(weights=weights, kernels=kernels), load(kernels="xla")

  def rounded(path, x):
    if path[-1].key != "kernel":
      return x
    values, scale = quantize(np.asarray(x), weights)
    scale = scale.reshape(-1, x.shape[1])
    return jnp.asarray(values.astype(np.float32) * np.repeat(scale, len(x) // len(scale), axis=0))

  expected = tiny_pair.changed(
    whole, params=jax.tree_util.tree_map_with_path(rounded, whole.target.params)
  )
  got, want = logits_of(pair), logits_of(expected)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * want.std())
  assert np.abs(want - logits_of(whole)).max() > 1e-3 * want.std()
  stored = dict(jax.tree_util.tree_leaves_with_path(whole.target.params))
  for path, x in jax.tree_util.tree_leaves_with_path(pair.target.params):
    assert (x.dtype == jnp.dtype(weights)) == (path[-1].key == "kernel"), name_of(path)
    if path[-1].key not in ("kernel", "kernel_scale"):
      np.testing.assert_array_equal(x, stored[path])
  assert pair.kernels.endswith(f"+{weights}")


@pytest.mark.parametrize(
  "weights, draft_weights", [("int8", "int8"), ("int8", "float"), ("int4", None), ("int4", "int8")]
)
def test_outputs_are_those_of_the_quantized_target(weights, draft_weights):
  pair = load(weights=weights, draft_weights=draft_weights)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:6]), row_keys(0, 0, 6)
  alone, together = (
    pair.decode_fn(GREEDY, chain(gamma))(prompt, keys, max_new_tokens=12) for gamma in (0, 3)
  )
  np.testing.assert_array_equal(together.tokens, alone.tokens)
  assert together.num_rounds < alone.num_rounds
  dtypes = {x.dtype.name for x in jax.tree.leaves(pair.draft.params)} & {"int8", "int4"}
  assert dtypes == {draft_weights or weights} - {"float"}


def test_scales_are_sharded_like_the_columns_of_their_matrices():
  config = load().config.with_layout(weights="int8", fused=False, kernels="xla")
  shardings = param_shardings(param_shapes(config), make_mesh())
  attention = shardings["decoder"]["layers_0"]["self_attention"]
  for name in ("query", "out"):
    columns = attention[name]["kernel"].spec[1:]
    assert columns == tuple(attention[name]["kernel_scale"].spec)


def restricted(count: int = 12):
  return functools.partial(frequent_tokens, target_text=outputs(), count=count)


def q_of(pair, num_tokens: int = 6):
  prompt = pair.prompt(tiny_pair.SENTENCES[:3])
  tokens = np.random.default_rng(0).integers(2, len(pair.vocabulary), (3, num_tokens))
  draft = pair.draft.build(RANDOM, chain(1))
  tokens = tokens.astype(np.int32)
  return np.asarray(proposals(pair.target.model, draft, pair.params, prompt, tokens)[1])[:, :, 0]


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_q_is_that_of_the_output_tokens_alone(weights):
  pair = load()
  draft = functools.partial(
    checkpoint_draft, model=str(tiny_pair.folder() / "near"), weights=weights
  )
  tokens = restricted()(pair.vocabulary)
  whole = q_of(pair.with_draft(draft(pair.target)))
  some = q_of(pair.with_draft(draft(pair.target, output_tokens=restricted())))
  assert not np.delete(some, tokens, axis=-1).any()
  want = whole[..., tokens] / whole[..., tokens].sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(some[..., tokens], want, rtol=1e-4, atol=1e-6)


def test_frequent_tokens_are_counted_and_include_eos():
  vocabulary = load().vocabulary
  encoded = [vocabulary.encode(line) for line in tiny_pair.SENTENCES[:20]]
  counts = np.bincount(np.concatenate(encoded), minlength=len(vocabulary))
  chosen = restricted(8)(vocabulary)
  others = np.setdiff1d(np.arange(len(vocabulary)), chosen)
  assert vocabulary.eos_id in chosen and chosen == sorted(set(chosen)) and len(chosen) == 8
  assert counts[others].max() <= min(counts[token] for token in chosen)
  assert frequent_tokens(vocabulary, outputs(), 1) == [vocabulary.eos_id]
  with pytest.raises(InputError, match="count is 0"):
    frequent_tokens(vocabulary, outputs(), 0)


@pytest.mark.parametrize("kind", ["heads", "eagle", "pass", "early_exit", "conditioned"])
def test_heads_are_quantized_and_propose_output_tokens_only(kind, tmp_path):
  pair = load()
  sizes = dict(gamma=3, emb_dim=8, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1)
  config = new_head(pair.target.model.config, kind, **sizes)
  save_model(str(tmp_path), config, tiny_pair.random_params(config, 0))
  options = dict(path=str(tmp_path), weights="int8")
  if kind in TARGET_LOGITS:
    with pytest.raises(InputError, match="no logits of its own"):
      speculator(pair.target, **options, output_tokens=restricted())
  else:
    options["output_tokens"] = restricted()
  drafted = pair.with_draft(speculator(pair.target, **options))
  if kind not in TARGET_LOGITS:
    q, tokens = q_of(drafted), restricted()(pair.vocabulary)
    assert not np.delete(q, tokens, axis=-1).any()
    np.testing.assert_allclose(q.sum(axis=-1), 1, rtol=1e-4)
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:4]), row_keys(0, 0, 4)
  alone, together = (
    drafted.decode_fn(GREEDY, chain(gamma))(prompt, keys, max_new_tokens=8) for gamma in (0, 2)
  )
  np.testing.assert_array_equal(together.tokens, alone.tokens)
