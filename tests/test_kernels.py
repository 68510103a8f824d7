"""Test the CPU kernels for few rows: results, bit-identical rows, compilation and its cache."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.memory import num_bytes
from specdec_jax.core.trees import Tree
from specdec_jax.models.families import for_decoding
from specdec_jax.models.kernels import gpu, skinny
from specdec_jax.models.layout import MASKED, Layout
from specdec_jax.models.quantization import quantize
from specdec_jax.models.t5 import T5Model

compiled = pytest.mark.skipif(
  not skinny.is_available(), reason="needs a C++ compiler and a CPU, one device"
)

in_bfloat16 = pytest.mark.skipif(
  not skinny.is_available(jnp.bfloat16), reason="needs a processor that multiplies bfloat16"
)

# (rows, depth, width) with full and partial tiles, one and many panels, and a full and partial last
# panel. The last two use several threads.
SHAPES = [(1, 5, 3), (2, 64, 300), (8, 160, 1000), (13, 70, 129), (300, 512, 512), (25, 1000, 260)]


def normal(rng, *shape):
  return rng.standard_normal(shape).astype(np.float32)


def operands(rows, depth, width, seed=0):
  """Return a random x [rows, depth] and matrix [depth, width]."""
  rng = np.random.default_rng(seed)
  return normal(rng, rows, depth), normal(rng, depth, width)


def matmul(x, w):
  """Multiply x by w with the kernel, with w packed in pairs if x is bfloat16."""
  packed = skinny.pack(w, pairs=x.dtype == jnp.bfloat16)
  return np.asarray(skinny.matmul(jnp.asarray(x, jnp.float32), jnp.asarray(packed)))


both_dtypes = pytest.mark.parametrize(
  "dtype", [pytest.param("float32", marks=compiled), pytest.param("bfloat16", marks=in_bfloat16)]
)


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_is_within_the_rounding_bound(shape, dtype):
  x, w = (operand.astype(jnp.dtype(dtype)) for operand in operands(*shape))
  got = matmul(x, w)
  x, w = x.astype(np.float32), w.astype(np.float32)
  assert got.shape == (shape[0], -(-shape[2] // 16) * 16) and not got[:, shape[2] :].any()
  exact = x.astype(np.float64) @ w.astype(np.float64)
  # Each multiply-add rounds by at most half a unit in the last place.
  bound = shape[1] * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w))
  assert (np.abs(got[:, : shape[2]] - exact) <= bound + 1e-12).all()


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_is_bit_identical_for_any_number_of_rows(shape, dtype):
  x, w = (operand.astype(jnp.dtype(dtype)) for operand in operands(*shape))
  together = matmul(x, w)
  for rows in (1, 3, 9):
    np.testing.assert_array_equal(matmul(x[-rows:], w), together[-rows:])


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_weights_give_the_result_of_their_float32_copy(shape):
  x, w = operands(*shape)
  half = w.astype(jnp.bfloat16)
  assert (half != w).any()
  np.testing.assert_array_equal(matmul(x, half), matmul(x, half.astype(np.float32)))


def int8_operands(shape, pairs):
  """Return x, its product with an int8 matrix as a function, and the matrix and its scales."""
  x, w = operands(*shape)
  kernel, scale = quantize(w)
  padded = np.pad(scale, (0, -shape[2] % 16))
  packed = jnp.asarray(skinny.pack(kernel, pairs))
  return x, functools.partial(skinny.matmul, panels=packed, scale=padded), kernel, scale


def require_same_rows(multiply, x):
  together = np.asarray(multiply(x))
  for rows in (1, 3, 9):
    np.testing.assert_array_equal(multiply(x[-rows:]), together[-rows:])


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_weights_give_the_scaled_result_of_their_copy(shape):
  x, multiply, kernel, scale = int8_operands(shape, pairs=False)
  got = np.asarray(multiply(x))
  want = matmul(x, kernel.astype(np.float32))[:, : shape[2]] * scale
  np.testing.assert_array_equal(got[:, : shape[2]], want)
  assert not got[:, shape[2] :].any()
  require_same_rows(multiply, x)


@in_bfloat16
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_weights_in_groups_of_four_are_multiplied_in_integers(shape):
  x, multiply, kernel, scale = int8_operands(shape, pairs=True)
  x *= np.logspace(-20, 20, len(x), dtype=np.float32)[:, None]
  x[:, 0] *= 100
  x[-1:] = 0
  largest = np.abs(x).max(axis=1, keepdims=True)
  unit = largest / np.float32(127 * 256)
  inverse = np.divide(np.float32(127 * 256), largest, where=largest > 0, out=np.zeros_like(largest))
  q = np.rint(x * inverse).astype(np.int64)
  assert (np.abs(q * unit.astype(float) - x) <= 0.501 * unit).all()
  high = (q + 128) >> 8
  low = q - 256 * high
  parts = [(part @ kernel.astype(np.int64)).astype(np.float32) for part in (high, low)]
  want = (parts[0] * np.float32(256) + parts[1]) * unit * scale
  got = np.asarray(multiply(x))
  np.testing.assert_array_equal(got[:, : shape[2]], want)
  assert not got[:, shape[2] :].any()
  require_same_rows(multiply, x)


@in_bfloat16
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_product_of_a_row_that_is_not_finite_is_not_finite(bad):
  x, multiply, *_ = int8_operands((3, 20, 16), pairs=True)
  x[1, 7] = bad
  finite = np.isfinite(multiply(x))
  assert finite[[0, 2]].all() and not finite[1].any()


@in_bfloat16
def test_largest_int8_sums_do_not_overflow():
  depth = 1 << 16
  kernel, scale = np.full((depth, 16), 127, np.int8), np.ones(16, np.float32)
  for sign in (1, -1):
    panels = skinny.pack(sign * kernel, pairs=True)
    for value in (1, -1):
      (got,) = np.asarray(skinny.matmul(np.full((1, depth), value, np.float32), panels, scale))
      np.testing.assert_allclose(got, sign * value * 127 * depth, rtol=1e-6)
  with pytest.raises(Exception, match="at most 65,536"):
    skinny.matmul(
      np.ones((1, depth + 4), np.float32), np.zeros((1, depth // 4 + 1, 64), np.int8), scale
    ).block_until_ready()


@pytest.mark.parametrize("weights, groups, largest", [("int8", 1, 127), ("int4", 3, 7)])
def test_quantization_changes_a_value_by_at_most_half_a_scale(weights, groups, largest):
  w = normal(np.random.default_rng(0), 384, 50) * np.logspace(-30, 30, 50)
  w[:, 3] = 0
  kernel, scale = quantize(w.astype(np.float32), weights)
  assert kernel.dtype == jnp.dtype(weights) and scale.dtype == np.float32
  kernel, scale = kernel.astype(int).reshape(groups, -1, 50), scale.reshape(groups, 1, 50)
  assert (scale[..., 3] == 1).all()
  assert (np.abs(kernel * scale.astype(float) - w.reshape(kernel.shape)) <= 0.5001 * scale).all()
  nonzero = np.arange(50) != 3
  assert (np.abs(kernel[..., nonzero]).max(axis=1) == largest).all()


def test_xla_stores_two_int4_values_in_a_byte():
  x = jnp.ones((64, 64), jnp.int4)
  program = jax.jit(lambda x: x + x).lower(x).compile()
  assert num_bytes(x) == program.memory_analysis().argument_size_in_bytes == 64 * 32


@pytest.mark.parametrize("kernels", ["xla", "gpu"])
@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("depth", [256, 200, 5])
def test_int4_product_is_that_of_the_matrix_that_its_scales_give(kernels, rows, depth):
  x, w = operands(rows, depth, 40)
  kernel, scale = quantize(w, "int4")
  scaled = kernel.astype(float) * np.repeat(scale, depth // len(scale), axis=0)
  kernel, scale = jnp.asarray(kernel), jnp.asarray(scale)
  if kernels == "gpu":
    normed = gpu.Normed(x, np.arange(depth, dtype=np.float32))
    products = [gpu.matmul(each, kernel.T, scale.T, jnp.float32) for each in (x, normed)]
    rms = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6)
    expected = [x @ scaled, (x / rms * np.arange(depth)) @ scaled]
  else:
    products = [Layout(weights="int4").matmul(jnp.asarray(x), kernel, scale, 40)]
    expected = [x @ scaled]
  for got, want in zip(products, expected):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@compiled
def test_more_threads_than_blocks():
  code = (
    "import numpy as np\n"
    "from specdec_jax.models.kernels import skinny\n"
    "assert skinny.is_available()\n"
    "x, w = np.ones((3, 1536), np.float32), np.ones((1536, 512), np.float32)\n"
    "assert (np.asarray(skinny.matmul(x, skinny.pack(w))) == 1536).all()\n"
  )
  threads = {**os.environ, "NPROC": "64"}
  subprocess.run([sys.executable, "-c", code], env=threads, check=True, timeout=120)


@compiled
def test_invalid_operands_are_rejected():
  x, w = operands(3, 8, 16)
  with pytest.raises(Exception, match="needs panels"):
    skinny.matmul(x[:, :7], skinny.pack(w)).block_until_ready()
  with pytest.raises(Exception, match="float32, bfloat16 or int8"):
    skinny.matmul(x, skinny.pack(w).astype(np.float16)).block_until_ready()
  with pytest.raises(Exception, match="int8 panels, and no others, need a scale"):
    skinny.matmul(x, skinny.pack(w).astype(np.int8)).block_until_ready()
  with pytest.raises(Exception, match="int8 panels, and no others, need a scale"):
    skinny.matmul(x, skinny.pack(w), np.ones(16, np.float32)).block_until_ready()
  with pytest.raises(Exception, match=r"need a scale \[16 N\]"):
    skinny.matmul(x, skinny.pack(w).astype(np.int8), np.ones(8, np.float32)).block_until_ready()
  with pytest.raises(Exception, match="Wrong buffer dtype"):
    skinny.matmul(x.astype(jnp.bfloat16), skinny.pack(w)).block_until_ready()
  with pytest.raises(Exception, match="in pairs, bfloat16"):
    skinny.matmul(x, skinny.pack(w, pairs=True)).block_until_ready()  # w is float32
  assert skinny.matmul(x[:0], skinny.pack(w)).shape == (0, 16)
  queries, cached, bias = attention_operands(2, 3, 4, 4, 5)
  for wrong in (bias[..., :4], bias[:, :, :2], np.repeat(bias, 2, axis=1)):
    with pytest.raises(Exception, match="queries .* need keys"):
      skinny.attend(queries, cached, cached, wrong, MASKED).block_until_ready()
  for wrong in (cached[:, :3], np.repeat(cached, 2, axis=1), cached[:, :0]):
    with pytest.raises(Exception, match="where G divides H"):
      skinny.attend(queries, wrong, wrong, bias, MASKED).block_until_ready()
  with pytest.raises(Exception, match="queries .* need keys"):
    skinny.attend(queries, cached, cached[:, :1], bias, MASKED).block_until_ready()
  with pytest.raises(Exception, match="needs a scale"):
    skinny.rms_norm(x, w[0]).block_until_ready()
  for scale, bias in ((x[0], w[0]), (w[0], x[0]), (x, x[0])):
    with pytest.raises(Exception, match="needs a scale .* and a bias"):
      skinny.layer_norm(x, scale, bias).block_until_ready()


def attention_operands(batch, block, heads, dim, slots, seed=0):
  """Return queries, keys, and a bias that masks half of the slots."""
  rng = np.random.default_rng(seed)
  hidden = np.where(rng.random((batch, 1, block, slots)) < 0.5, MASKED, 0).astype(np.float32)
  bias = normal(rng, 1, heads, block, slots) + hidden
  queries = normal(rng, batch, block, heads, dim)
  return queries, normal(rng, batch, heads, slots, dim), bias


# (batch, block, heads, dim, slots) with full and partial vectors. The last uses several threads.
ATTENTION_SHAPES = [(1, 6, 4, 64, 80), (2, 5, 3, 3, 7), (3, 1, 2, 40, 33), (2, 40, 4, 72, 128)]


def numpy_attention(queries, keys, values, bias, cap=None):
  """Return attention in float64, with a key and a value for each head of the queries."""
  logits = np.einsum("bkhd,bhtd->bhkt", *(x.astype(np.float64) for x in (queries, keys)))
  logits = (cap * np.tanh(logits / cap) if cap else logits) + bias
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  weights /= weights.sum(axis=-1, keepdims=True)
  return np.einsum("bhkt,bhtd->bkhd", weights, values)


@compiled
@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=str)
def test_attention_matches_numpy(shape):
  queries, cached, bias = attention_operands(*shape)
  values = cached[..., ::-1].copy()
  for given in (bias, bias[:1], bias[:, :1], bias[:, :, :1]):
    got = skinny.attend(queries, cached, values, given, MASKED)
    want = numpy_attention(queries, cached, values, given)
    np.testing.assert_allclose(got, want, atol=2e-5)


@compiled
@pytest.mark.parametrize("cap", [3.0, 50.0])
@pytest.mark.parametrize("shape", ATTENTION_SHAPES, ids=str)
def test_attention_with_soft_cap_matches_numpy(shape, cap):
  queries, cached, bias = attention_operands(*shape)
  got = skinny.attend(queries, cached, cached, bias, MASKED, cap)
  np.testing.assert_allclose(got, numpy_attention(queries, cached, cached, bias, cap), atol=2e-5)


@compiled
def test_soft_cap_is_accurate_for_small_and_large_logits():
  queries, cached, bias = attention_operands(1, 6, 2, 24, 40)
  uncapped = skinny.attend(queries, cached, cached, bias, MASKED)
  np.testing.assert_allclose(
    skinny.attend(queries, cached, cached, bias, MASKED, 1e7), uncapped, atol=2e-5
  )
  for scale in (0, 1e-30, 1e35):
    scaled = (scale * queries).astype(np.float32)
    want = numpy_attention(scaled, cached, cached, bias, 4.0)
    got = skinny.attend(scaled, cached, cached, bias, MASKED, 4.0)
    np.testing.assert_allclose(got, want, atol=2e-5)


@compiled
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_heads_of_a_group_share_keys_and_values(groups, cap):
  queries, cached, bias = attention_operands(2, 3, 6, 40, 33)
  keys = cached[:, :groups]
  values = keys[..., ::-1].copy()
  repeated = (np.repeat(x, 6 // groups, axis=1) for x in (keys, values))
  want = skinny.attend(queries, *repeated, bias, MASKED, cap)
  np.testing.assert_array_equal(skinny.attend(queries, keys, values, bias, MASKED, cap), want)


@compiled
@pytest.mark.parametrize("cap", [None, 3.0])
def test_query_is_bit_identical_for_any_block_and_placement_of_masked_slots(cap):
  batch, block, heads, dim, slots = 2, 6, 4, 40, 20
  queries, cached, bias = attention_operands(batch, block, heads, dim, slots)
  cached = cached[:, :2]
  together = np.asarray(skinny.attend(queries, cached, cached, bias, MASKED, cap))
  for k in range(block):
    alone = skinny.attend(queries[:, [k]], cached, cached, bias[:, :, [k]], MASKED, cap)
    np.testing.assert_array_equal(alone[:, 0], together[:, k])
  # The same slots in the same order, among masked slots with other values.
  wider = np.sort(np.random.default_rng(1).permutation(3 * slots)[:slots])
  spread = np.full((batch, 2, 3 * slots, dim), 7, np.float32)
  spread[:, :, wider] = cached
  hidden = np.full((batch, heads, block, 3 * slots), MASKED, np.float32)
  hidden[..., wider] = bias
  got = skinny.attend(queries, spread, spread, hidden, MASKED, cap)
  np.testing.assert_array_equal(got, together)


@compiled
def test_fully_masked_query_attends_to_all_slots_and_nan_propagates():
  queries, cached, _ = attention_operands(1, 2, 1, 4, 5)
  bias = np.full((1, 1, 1, 5), 2 * MASKED, np.float32)
  got = skinny.attend(0 * queries, cached, cached, bias, MASKED)
  mean = cached.mean(axis=2)
  np.testing.assert_allclose(got[:, 0], mean, rtol=1e-5)
  cached[0, 0, 3, 1] = np.nan
  for cap in (None, 3.0):
    assert np.isnan(skinny.attend(queries, cached, cached, 0 * bias, MASKED, cap)).all()


@pytest.mark.parametrize(
  "heads, groups, block, slots, has_rows, cap",
  [(4, 4, 300, 300, True, None), (4, 2, 520, 40, False, 3.0), (2, 1, 257, 64, True, 3.0)],
)
def test_many_queries_attend_in_parts_as_at_once(heads, groups, block, slots, has_rows, cap):
  """The last part is not full; the bias is one for all queries, or has a row for each."""
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(2, heads, block, 16))
  keys, values = rng.normal(size=(2, 2, groups, slots, 16))
  bias = rng.normal(size=(2, heads if has_rows else 1, block if has_rows else 1, slots))
  bias[rng.random(bias.shape) < 0.3] = MASKED
  operands = [jnp.asarray(x, jnp.float32) for x in (queries, keys, values, bias)]
  got, want = (Layout(kernels=kernels).attend(*operands, cap) for kernels in ("skinny", "xla"))
  np.testing.assert_allclose(got, want, atol=1e-5)


@compiled
@pytest.mark.parametrize("shape", [(1, 3), (5, 64), (300, 515)], ids=str)
def test_rms_norm_matches_numpy(shape):
  x, scale = operands(*shape, shape[1])[0], operands(1, shape[1], 1)[0][0]
  want = x / np.sqrt(np.square(x.astype(np.float64)).mean(axis=1, keepdims=True) + 1e-6) * scale
  got = skinny.rms_norm(x, scale)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(skinny.rms_norm(x[-1:], scale), got[-1:])


@compiled
@pytest.mark.parametrize("shape", [(1, 3), (5, 64), (300, 515)], ids=str)
def test_layer_norm_matches_numpy(shape):
  rng = np.random.default_rng(0)
  x, scale, bias = normal(rng, *shape) + 3, normal(rng, shape[1]), normal(rng, shape[1])
  x[-1] *= 1e-3  # so that epsilon counts
  centered = x.astype(np.float64) - x.mean(axis=1, keepdims=True, dtype=np.float64)
  deviation = np.sqrt(np.square(centered).mean(axis=1, keepdims=True) + 1e-5)
  got = skinny.layer_norm(x, scale, bias)
  np.testing.assert_allclose(got, centered / deviation * scale + bias, rtol=1e-5, atol=1e-5)
  for rows in (1, 2, 4):
    np.testing.assert_array_equal(skinny.layer_norm(x[-rows:], scale, bias), got[-rows:])


@compiled
def test_vmap_of_matmul():
  x, w = operands(6, 32, 48)
  got = jax.vmap(skinny.matmul, in_axes=(0, None))(x.reshape(3, 2, 32), skinny.pack(w))
  np.testing.assert_array_equal(got.reshape(6, 48), matmul(x, w))


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("vocab_size", [16, 27])
def test_model_with_the_kernels_has_the_logits_of_xla(vocab_size):
  config = tiny.config(vocab_size)
  config, params = for_decoding(config, tiny.params(config, 0))
  tokens = jnp.asarray([[0, 5, 7, 9, 11]])

  def logits(kernels, params):
    model = T5Model(config.with_layout(kernels=kernels))
    _, cache = model.prefill(params, jnp.asarray([[3, 4, 5, 1]]), 8)
    return model.extend(params, cache, tokens)[0]

  got = logits("skinny", tiny.packed(params))
  np.testing.assert_allclose(got, logits("xla", params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param("float32", marks=compiled),
    pytest.param("bfloat16", marks=(in_bfloat16, pytest.mark.slow)),
  ],
)
def test_token_has_bit_identical_logits_alone_in_a_block_and_in_a_tree(dtype):
  config = tiny.config(27, layout=Layout(dtype=jnp.dtype(dtype)))
  config, params = for_decoding(config, tiny.params(config, 0))
  config = config.with_layout(kernels="skinny")
  model, params = T5Model(config), tiny.packed(params, pairs=dtype == "bfloat16")
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  prompt, tokens = jnp.asarray([[3, 4, 5, 1]]), jnp.asarray([[0, 5, 7, 9, 11]])
  _, cache = model.prefill(params, prompt, 8)
  together = model.extend(params, cache, tokens)[0]
  # Another child of the first token precedes the chain that is compared.
  tree, draft_tokens = Tree((0, 0, 2, 3, 4)), jnp.asarray([[0, 8, 5, 7, 9, 11]])
  _, wider = model.prefill(params, prompt, 20)
  branching = model.extend(params, wider, draft_tokens, tree)[0][:, [0, 2, 3, 4, 5]]
  np.testing.assert_array_equal(branching, together)
  for i in range(5):
    logits, _, extended = model.extend(params, cache, tokens[:, i : i + 1])
    np.testing.assert_array_equal(logits[:, 0], together[:, i])
    cache = model.commit(extended, jnp.asarray([i + 1]))


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_stored_as_bfloat16_can_stay_in_bfloat16(tmp_path, tied):
  config = tiny.config(tied_logits=tied)
  save_model(str(tmp_path), config, tiny.params(config, 0), dtype=jnp.bfloat16)
  stored = open_checkpoint(str(tmp_path))
  fused = dataclasses.replace(config.with_layout(fused=True), tied_logits=False)
  skinny_config = fused.with_layout(kernels="skinny")
  params = stored.load(skinny_config.with_layout(weights="stored"))
  for path, value in jax.tree_util.tree_leaves_with_path(params):
    dtype = jnp.bfloat16 if path[-1].key == "kernel" else jnp.float32
    assert value.dtype == dtype, path
  widened = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  want = tiny.packed(stored.load(fused))
  jax.tree.map(np.testing.assert_array_equal, widened, want)
  jax.tree.map(np.testing.assert_array_equal, stored.load(skinny_config), want)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """Reset the registered library and return a new home directory, which has an empty cache."""
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(skinny, "_register", functools.cache(skinny._register.__wrapped__))
  return tmp_path


@pytest.mark.parametrize(
  "compiler, reason",
  [
    ("/bin/false", "exit status 1"),
    ("/no/such/compiler", "No such file"),
    ("'g++", 'CXX is "\'g++", which is not a command: No closing quotation'),
  ],
)
def test_failing_compiler_is_reported_and_xla_is_used(fresh, monkeypatch, caplog, compiler, reason):
  monkeypatch.setenv("CXX", compiler)
  assert not skinny.is_available()
  assert reason in caplog.text and "XLA runs all matmuls" in caplog.text
  assert not [path for path in fresh.rglob("*") if path.is_file() or path.name.startswith("tmp")]


def test_missing_compiler_is_reported(fresh, monkeypatch, caplog):
  monkeypatch.delenv("CXX", raising=False)
  monkeypatch.setattr(skinny.shutil, "which", lambda name: None)
  assert not skinny.is_available()
  assert "there is no C++ compiler" in caplog.text


@pytest.fixture(scope="module")
def library(tmp_path_factory):
  """Return the content of a library that is compiled into the cache once for all tests."""
  home = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HOME", str(home))
    skinny._library()
  (cached,) = (path for path in home.rglob("*") if path.is_file())
  return cached.read_bytes()


@pytest.fixture
def compilations(fresh, library, monkeypatch):
  """Replace the compiler by a copy of `library` and return the list of its calls."""
  calls = []

  def copy(command, cwd, **_):
    calls.append(command)
    pathlib.Path(cwd, command[-1]).write_bytes(library)

  monkeypatch.setattr(skinny.subprocess, "run", copy)
  return calls


def cached_files(home):
  """Return the files in the cache of a home directory."""
  return [*(home / ".cache" / "specdec_jax" / "kernels").iterdir()]


@pytest.mark.slow
@compiled
def test_library_is_compiled_once(fresh, compilations):
  for _ in range(3):
    assert skinny._library().SkinnyMatmul
  (path,) = cached_files(fresh)
  assert len(compilations) == 1
  assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@compiled
@pytest.mark.parametrize(
  "damage, mode",
  [
    (lambda whole: whole[:20_000], 0o600),
    (lambda whole: b"", 0o600),
    (lambda whole: bytes(len(whole)), 0o600),
    (lambda whole: whole[:-1] + b"?", 0o600),
    (lambda whole: whole, 0o660),
    (lambda whole: whole, 0o602),
  ],
  ids=["truncated", "empty", "zeroed", "one byte", "group writes", "others write"],
)
def test_library_that_is_damaged_or_writable_by_others_is_compiled_again(
  fresh, compilations, library, damage, mode
):
  """Loading a damaged library would end the process with a signal."""
  skinny._library()
  (path,) = cached_files(fresh)
  path.unlink()  # the old file stays mapped into this process
  path.write_bytes(damage(library))
  path.chmod(mode)
  loaded = skinny._library()
  assert loaded.SkinnyMatmul and len(compilations) == 2 and cached_files(fresh) == [path]
  assert path.read_bytes() == library and path.stat().st_mode & 0o777 == 0o600
  skinny._library()
  assert len(compilations) == 2


def assert_not_cached(home, compilations, caplog, monkeypatch, reason):
  """Assert that each call compiles the library in a temporary folder, with a warning."""
  scratch = home / "scratch"
  scratch.mkdir()
  monkeypatch.setattr(skinny.tempfile, "tempdir", str(scratch))
  for calls in (1, 2):
    assert skinny._library().SkinnyMatmul and len(compilations) == calls
  assert "compiled for this process only" in caplog.text and reason in caplog.text
  assert not [*scratch.iterdir()]


@pytest.mark.slow
@compiled
def test_cache_folder_writable_by_others_is_not_used(fresh, compilations, caplog, monkeypatch):
  folder = fresh / ".cache" / "specdec_jax" / "kernels"
  folder.mkdir(parents=True)
  folder.chmod(0o770)
  assert_not_cached(fresh, compilations, caplog, monkeypatch, "others may write to")
  assert cached_files(fresh) == []


@pytest.mark.slow
@compiled
def test_cache_folder_of_another_user_is_not_used(fresh, compilations, caplog, monkeypatch):
  user_id = os.geteuid()
  monkeypatch.setattr(skinny.os, "geteuid", lambda: user_id + 1)
  assert_not_cached(fresh, compilations, caplog, monkeypatch, "others may write to")
  assert cached_files(fresh) == []


@pytest.mark.slow
@compiled
def test_library_is_compiled_without_a_writable_home(fresh, compilations, caplog, monkeypatch):
  (fresh / ".cache").write_text("in the way")
  assert_not_cached(fresh, compilations, caplog, monkeypatch, "Not a directory")


@pytest.mark.parametrize("backend, devices", [("gpu", 1), ("tpu", 4), ("cpu", 2)])
def test_kernels_are_unavailable_without_a_single_cpu_device(
  fresh, monkeypatch, caplog, backend, devices
):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  assert not skinny.is_available() and not caplog.text
