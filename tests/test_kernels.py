"""Products, attention and norms of few rows: right, the same bits for any number of rows, and not
needed to run."""

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

from specdec_jax.checkpoints.folder import open_folder, save_model
from specdec_jax.core.trees import Tree
from specdec_jax.kernels import skinny
from specdec_jax.models.families import for_decoding
from specdec_jax.models.layers import MASKED
from specdec_jax.models.t5 import T5Model

compiled = pytest.mark.skipif(
  not skinny.ready(), reason="needs a C++ compiler and a CPU, one device"
)

in_bfloat16 = pytest.mark.skipif(
  not skinny.ready(jnp.bfloat16), reason="needs a processor that multiplies bfloat16"
)

# Rows that fill tiles and do not, one panel and many, the last panel whole and not; the last two
# matrices are shared among threads.
SHAPES = [(1, 5, 3), (2, 64, 300), (8, 160, 1000), (13, 70, 129), (300, 512, 512), (25, 1000, 260)]


def operands(rows, depth, width, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return draw(rows, depth), draw(depth, width)


def product(x, w):
  """Of bfloat16 where x is."""
  packed = skinny.pack(w, pairs=x.dtype == jnp.bfloat16)
  return np.asarray(skinny.matmul(jnp.asarray(x, jnp.float32), jnp.asarray(packed)))


either = pytest.mark.parametrize(
  "dtype", [pytest.param("float32", marks=compiled), pytest.param("bfloat16", marks=in_bfloat16)]
)


@either
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_right(shape, dtype):
  x, w = (operand.astype(jnp.dtype(dtype)) for operand in operands(*shape))
  got = product(x, w)
  x, w = x.astype(np.float32), w.astype(np.float32)
  assert got.shape == (shape[0], -(-shape[2] // 16) * 16) and not got[:, shape[2] :].any()
  exact = x.astype(np.float64) @ w.astype(np.float64)
  # Rounding of a chain of multiply-adds: at most half a unit in the last place for each.
  bound = shape[1] * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w))
  assert (np.abs(got[:, : shape[2]] - exact) <= bound + 1e-12).all()


@either
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_bits_in_any_company(shape, dtype):
  x, w = (operand.astype(jnp.dtype(dtype)) for operand in operands(*shape))
  together = product(x, w)
  for rows in (1, 3, 9):
    np.testing.assert_array_equal(product(x[-rows:], w), together[-rows:])


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_weights_give_the_bits_of_their_float32_copy(shape):
  x, w = operands(*shape)
  half = w.astype(jnp.bfloat16)
  assert (half != w).any()
  np.testing.assert_array_equal(product(x, half), product(x, half.astype(np.float32)))


@compiled
def test_a_machine_may_have_more_threads_than_a_matrix_has_blocks():
  code = (
    "import numpy as np\n"
    "from specdec_jax.kernels import skinny\n"
    "assert skinny.ready()\n"
    "x, w = np.ones((3, 1536), np.float32), np.ones((1536, 512), np.float32)\n"
    "assert (np.asarray(skinny.matmul(x, skinny.pack(w))) == 1536).all()\n"
  )
  threads = {**os.environ, "NPROC": "64"}
  subprocess.run([sys.executable, "-c", code], env=threads, check=True, timeout=120)


@compiled
def test_what_does_not_fit_is_refused():
  x, w = operands(3, 8, 16)
  with pytest.raises(Exception, match="goes with panels"):
    skinny.matmul(x[:, :7], skinny.pack(w)).block_until_ready()
  with pytest.raises(Exception, match="float32 or bfloat16"):
    skinny.matmul(x, skinny.pack(w).astype(np.float16)).block_until_ready()
  with pytest.raises(Exception, match="Wrong buffer dtype"):
    skinny.matmul(x.astype(jnp.bfloat16), skinny.pack(w)).block_until_ready()
  with pytest.raises(Exception, match="in pairs, bfloat16"):
    skinny.matmul(x, skinny.pack(w, pairs=True)).block_until_ready()  # of float32
  assert skinny.matmul(x[:0], skinny.pack(w)).shape == (0, 16)
  queries, cached, bias = attended(2, 3, 2, 4, 5)
  for wrong in (bias[..., :4], bias[:, :, :2], np.repeat(bias, 2, axis=1)):
    with pytest.raises(Exception, match="queries .* go with keys"):
      skinny.attend(queries, cached, cached, wrong, MASKED).block_until_ready()
  with pytest.raises(Exception, match="goes with a scale"):
    skinny.rms_norm(x, w[0]).block_until_ready()


def attended(batch, block, heads, dim, slots, seed=0):
  """Queries, what is cached, and a bias that hides half of the slots."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  hidden = np.where(rng.random((batch, 1, block, slots)) < 0.5, MASKED, 0).astype(np.float32)
  bias = draw(1, heads, block, slots) + hidden
  return draw(batch, block, heads, dim), draw(batch, heads, slots, dim), bias


# A dimension that fills vectors and does not; the last is shared among threads.
ATTENDED = [(1, 6, 4, 64, 80), (2, 5, 3, 3, 7), (3, 1, 2, 40, 33), (2, 40, 4, 72, 128)]


@compiled
@pytest.mark.parametrize("shape", ATTENDED, ids=str)
def test_attention_is_right(shape):
  queries, cached, bias = attended(*shape)
  values = cached[..., ::-1].copy()
  for given in (bias, bias[:1], bias[:, :1], bias[:, :, :1]):
    got = skinny.attend(queries, cached, values, given, MASKED)
    logits = np.einsum("bkhd,bhtd->bhkt", *(x.astype(np.float64) for x in (queries, cached)))
    weights = np.exp(logits + given - (logits + given).max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("bhkt,bhtd->bkhd", weights, values)
    np.testing.assert_allclose(got, want, atol=2e-5)


@compiled
def test_a_query_gives_the_same_bits_in_any_company_and_cache():
  shape = batch, block, heads, dim, slots = 2, 6, 3, 40, 20
  queries, cached, bias = attended(*shape)
  together = np.asarray(skinny.attend(queries, cached, cached, bias, MASKED))
  for k in range(block):
    alone = skinny.attend(queries[:, [k]], cached, cached, bias[:, :, [k]], MASKED)
    np.testing.assert_array_equal(alone[:, 0], together[:, k])
  # The same slots in the same order, among hidden ones that hold anything.
  wider = np.sort(np.random.default_rng(1).permutation(3 * slots)[:slots])
  spread = np.full((batch, heads, 3 * slots, dim), 7, np.float32)
  spread[:, :, wider] = cached
  hidden = np.full((batch, heads, block, 3 * slots), MASKED, np.float32)
  hidden[..., wider] = bias
  np.testing.assert_array_equal(skinny.attend(queries, spread, spread, hidden, MASKED), together)


@compiled
def test_a_query_that_sees_nothing_sees_all_and_what_is_not_a_number_stays():
  queries, cached, _ = attended(1, 2, 1, 4, 5)
  bias = np.full((1, 1, 1, 5), 2 * MASKED, np.float32)
  got = skinny.attend(0 * queries, cached, cached, bias, MASKED)
  mean = cached.mean(axis=2)
  np.testing.assert_allclose(got[:, 0], mean, rtol=1e-5)
  cached[0, 0, 3, 1] = np.nan
  assert np.isnan(skinny.attend(queries, cached, cached, 0 * bias, MASKED)).all()


@compiled
@pytest.mark.parametrize("shape", [(1, 3), (5, 64), (300, 515)], ids=str)
def test_the_norm_is_right(shape):
  x, scale = operands(*shape, shape[1])[0], operands(1, shape[1], 1)[0][0]
  want = x / np.sqrt(np.square(x.astype(np.float64)).mean(axis=1, keepdims=True) + 1e-6) * scale
  got = skinny.rms_norm(x, scale)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(skinny.rms_norm(x[-1:], scale), got[-1:])


@compiled
def test_a_batch_of_products_is_many():
  x, w = operands(6, 32, 48)
  got = jax.vmap(skinny.matmul, in_axes=(0, None))(x.reshape(3, 2, 32), skinny.pack(w))
  np.testing.assert_array_equal(got.reshape(6, 48), product(x, w))


@compiled
@pytest.mark.parametrize("vocab_size", [16, 27])
def test_a_model_with_it_says_the_same(vocab_size):
  config = tiny.config(vocab_size)
  config, params = for_decoding(config, tiny.params(config, 0))
  tokens = jnp.asarray([[0, 5, 7, 9, 11]])

  def logits(kernels, params):
    model = T5Model(dataclasses.replace(config, kernels=kernels))
    _, cache = model.prefill(params, jnp.asarray([[3, 4, 5, 1]]), 8)
    return model.extend(params, cache, tokens)[0]

  got = logits("skinny", tiny.packed(params))
  np.testing.assert_allclose(got, logits("xla", params), rtol=1e-4, atol=1e-5)


@either
def test_a_token_has_the_same_logits_alone_in_a_block_and_in_a_tree(dtype):
  config = tiny.config(27, dtype=jnp.dtype(dtype))
  config, params = for_decoding(config, tiny.params(config, 0))
  config = dataclasses.replace(config, kernels="skinny")
  model, params = T5Model(config), tiny.packed(params, pairs=dtype == "bfloat16")
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  prompt, tokens = jnp.asarray([[3, 4, 5, 1]]), jnp.asarray([[0, 5, 7, 9, 11]])
  _, cache = model.prefill(params, prompt, 8)
  together = model.extend(params, cache, tokens)[0]
  # Another child of the first token stands between it and the chain that is looked at.
  tree, guesses = Tree((0, 0, 2, 3, 4)), jnp.asarray([[0, 8, 5, 7, 9, 11]])
  _, wider = model.prefill(params, prompt, 20)
  branching = model.extend(params, wider, guesses, tree)[0][:, [0, 2, 3, 4, 5]]
  np.testing.assert_array_equal(branching, together)
  for at in range(5):
    logits, _, extended = model.extend(params, cache, tokens[:, at : at + 1])
    np.testing.assert_array_equal(logits[:, 0], together[:, at])
    cache = model.commit(extended, jnp.asarray([at + 1]))


@compiled
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_stored_as_bfloat16_can_stay_so(tmp_path, tied):
  config = tiny.config(tied_logits=tied)
  save_model(str(tmp_path), config, tiny.params(config, 0))  # stores bfloat16
  stored = open_folder(str(tmp_path))
  fused = dataclasses.replace(config, fused=True, tied_logits=False)
  skinny_config = dataclasses.replace(fused, kernels="skinny")
  ours = stored.load(skinny_config, stored_weights=True)
  for path, value in jax.tree_util.tree_leaves_with_path(ours):
    kind = jnp.bfloat16 if path[-1].key == "kernel" else jnp.float32
    assert value.dtype == kind, path
  widened = jax.tree.map(lambda x: x.astype(jnp.float32), ours)
  want = tiny.packed(stored.load(fused))
  jax.tree.map(np.testing.assert_array_equal, widened, want)
  jax.tree.map(np.testing.assert_array_equal, stored.load(skinny_config), want)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """`skinny` as in a process, a home and a processor's cache of its own."""
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(skinny, "_registered", functools.cache(skinny._registered.__wrapped__))
  return tmp_path


@pytest.mark.parametrize(
  "compiler, said",
  [
    ("/bin/false", "exit status 1"),
    ("/no/such/compiler", "No such file"),
    ("'g++", 'CXX is "\'g++", which is not a command: No closing quotation'),
  ],
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


@pytest.fixture(scope="module")
def library(tmp_path_factory):
  """The bytes of a library that was compiled and kept, once for all that follows."""
  home = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HOME", str(home))
    skinny._library()
  (kept,) = (path for path in home.rglob("*") if path.is_file())
  return kept.read_bytes()


@pytest.fixture
def compilations(fresh, library, monkeypatch):
  """How often the compiler was called, which only copies."""
  calls = []

  def copy(command, cwd, **_):
    calls.append(command)
    pathlib.Path(cwd, command[-1]).write_bytes(library)

  monkeypatch.setattr(skinny.subprocess, "run", copy)
  return calls


def kept(home):
  return [*(home / ".cache" / "specdec_jax" / "kernels").iterdir()]


@compiled
def test_it_is_compiled_once(fresh, compilations):
  for _ in range(3):
    assert skinny._library().SkinnyMatmul
  (path,) = kept(fresh)
  assert len(compilations) == 1
  assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@compiled
@pytest.mark.parametrize(
  "harm, mode",
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
def test_a_library_that_is_damaged_or_open_to_others_is_compiled_anew(
  fresh, compilations, library, harm, mode
):
  """A damaged one, mapped into memory, would end the process with a signal."""
  skinny._library()
  (path,) = kept(fresh)
  path.unlink()  # it is mapped into this process
  path.write_bytes(harm(library))
  path.chmod(mode)
  loaded = skinny._library()
  assert loaded.SkinnyMatmul and len(compilations) == 2 and kept(fresh) == [path]
  assert path.read_bytes() == library and path.stat().st_mode & 0o777 == 0o600
  skinny._library()
  assert len(compilations) == 2


def is_for_this_process_alone(home, compilations, caplog, monkeypatch, why):
  scratch = home / "scratch"
  scratch.mkdir()
  monkeypatch.setattr(skinny.tempfile, "tempdir", str(scratch))
  for calls in (1, 2):
    assert skinny._library().SkinnyMatmul and len(compilations) == calls
  assert "compiled for this process alone" in caplog.text and why in caplog.text
  assert not [*scratch.iterdir()]


@compiled
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777], ids=oct)
def test_a_folder_that_others_may_write_to_is_not_used(
  fresh, compilations, caplog, monkeypatch, mode
):
  folder = fresh / ".cache" / "specdec_jax" / "kernels"
  folder.mkdir(parents=True)
  folder.chmod(mode)
  is_for_this_process_alone(fresh, compilations, caplog, monkeypatch, "others may write to")
  assert kept(fresh) == []


@compiled
def test_a_folder_of_another_user_is_not_used(fresh, compilations, caplog, monkeypatch):
  mine = os.geteuid()
  monkeypatch.setattr(skinny.os, "geteuid", lambda: mine + 1)
  is_for_this_process_alone(fresh, compilations, caplog, monkeypatch, "others may write to")
  assert kept(fresh) == []


@compiled
def test_a_home_that_cannot_be_written_to_is_no_hindrance(fresh, compilations, caplog, monkeypatch):
  (fresh / ".cache").write_text("in the way")
  is_for_this_process_alone(fresh, compilations, caplog, monkeypatch, "Not a directory")


@pytest.mark.parametrize("backend, devices", [("gpu", 1), ("tpu", 4), ("cpu", 2)])
def test_it_is_for_one_cpu(fresh, monkeypatch, caplog, backend, devices):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  monkeypatch.setattr(jax, "device_count", lambda: devices)
  assert not skinny.ready() and not caplog.text
