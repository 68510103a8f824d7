"""Products of few rows: right, the same bits for any number of rows, and not needed to run."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints.folder import open_folder, save_model
from specdec_jax.kernels import skinny
from specdec_jax.models.t5 import for_decoding, t5_model

compiled = pytest.mark.skipif(
  not skinny.ready(), reason="needs a C++ compiler and a CPU, one device"
)

# Rows of each kind of chunk, columns that fill tiles, vectors and neither, bands whole and not; the
# last two are shared among threads.
SHAPES = [(1, 5, 3), (2, 64, 300), (8, 160, 1000), (13, 70, 129), (12, 512, 512), (64, 1000, 260)]


def operands(rows, depth, width, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return draw(rows, depth), draw(depth, width)


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_right(shape):
  x, w = operands(*shape)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  # Rounding of a chain of multiply-adds: at most one unit in the last place for each.
  bound = shape[1] * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w))
  assert (np.abs(skinny.matmul(x, w) - exact) <= bound + 1e-12).all()


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_bits_in_any_company(shape):
  x, w = operands(*shape)
  together = np.asarray(skinny.matmul(x, w))
  for rows in (1, 3, 9):
    np.testing.assert_array_equal(skinny.matmul(x[-rows:], w), together[-rows:])


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_weights_give_the_bits_of_their_float32_copy(shape):
  x, w = operands(*shape)
  half = w.astype(jnp.bfloat16)
  assert (half != w).any()
  np.testing.assert_array_equal(skinny.matmul(x, half), skinny.matmul(x, half.astype(jnp.float32)))


@compiled
def test_more_rows_than_it_is_good_for_are_left_to_xla():
  text = lambda rows: jax.jit(skinny.matmul).lower(*operands(rows, 8, 16)).as_text()
  assert "specdec_skinny_matmul" in text(skinny.MAX_ROWS)
  assert "specdec_skinny_matmul" not in text(skinny.MAX_ROWS + 1)


@compiled
def test_a_batch_of_products_is_many():
  x, w = operands(6, 32, 48)
  got = jax.vmap(skinny.matmul, in_axes=(0, None))(x.reshape(3, 2, 32), w)
  np.testing.assert_array_equal(got.reshape(6, 48), skinny.matmul(x, w))


@compiled
def test_a_model_with_it_says_the_same():
  config = tiny.config()
  config, params = for_decoding(config, tiny.params(config, 0))
  tokens = jnp.asarray([[0, 5, 7, 9, 11]])

  def logits(kernels):
    model = t5_model(dataclasses.replace(config, kernels=kernels))
    cache = model.start(params, jnp.asarray([[3, 4, 5, 1]]), 8)
    return model.extend(params, cache, tokens)[0]

  np.testing.assert_allclose(logits("skinny"), logits("xla"), rtol=1e-4, atol=1e-5)


@compiled
def test_weights_stored_as_bfloat16_can_stay_so(tmp_path):
  config = tiny.config()
  save_model(str(tmp_path), config, tiny.params(config, 0))  # stores bfloat16
  stored = open_folder(str(tmp_path))
  load = functools.partial(stored.load, stored_weights=True)
  fused = dataclasses.replace(config, fused=True)
  ours, xla = (load(dataclasses.replace(fused, kernels=k)) for k in ("skinny", "xla"))
  name = lambda path: path[-1].key
  for path, value in jax.tree_util.tree_leaves_with_path(ours):
    assert value.dtype == (jnp.bfloat16 if name(path) == "kernel" else jnp.float32), path
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x.astype(float), ours), xla)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(xla))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """`skinny` as in a process, a home and a processor's cache of its own."""
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(skinny, "ready", functools.cache(skinny.ready.__wrapped__))
  return tmp_path


@pytest.mark.parametrize(
  "compiler, said", [("/bin/false", "exit status 1"), ("/no/such/compiler", "No such file")]
)
def test_without_a_compiler_xla_does_it_and_the_user_is_told(
  fresh, monkeypatch, caplog, compiler, said
):
  monkeypatch.setenv("CXX", compiler)
  assert not skinny.ready()
  assert said in caplog.text and "XLA multiplies matrices" in caplog.text
  assert not [path for path in fresh.rglob("*") if path.is_file() or path.name.startswith("tmp")]


def test_no_compiler_at_all_is_told_too(fresh, monkeypatch, caplog):
  monkeypatch.delenv("CXX", raising=False)
  monkeypatch.setattr(skinny.shutil, "which", lambda name: None)
  assert not skinny.ready()
  assert "there is no C++ compiler" in caplog.text


@compiled
def test_it_is_compiled_once(fresh, monkeypatch):
  first = skinny._compiled()
  assert first.is_relative_to(fresh) and [*first.parent.iterdir()] == [first]
  monkeypatch.setattr(skinny.subprocess, "run", None)
  assert skinny._compiled() == first


@compiled
def test_a_home_that_cannot_be_written_to_is_no_hindrance(fresh, monkeypatch):
  (fresh / ".cache").write_text("in the way")
  assert pathlib.Path(skinny._compiled()).exists()


@pytest.mark.parametrize("backend, devices", [("gpu", 1), ("tpu", 4), ("cpu", 2)])
def test_it_is_for_one_cpu(fresh, monkeypatch, caplog, backend, devices):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  assert not skinny.ready() and not caplog.text
