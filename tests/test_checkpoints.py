"""Test this project's checkpoint format: round trips, errors and failed saves."""

import dataclasses
import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import serialization, traverse_util

from specdec_jax.checkpoints.load import load_model
from specdec_jax.checkpoints.save import save_model
from specdec_jax.errors import InputError
from specdec_jax.models.families import for_decoding

CONFIG = tiny.config(vocab_size=20, layers=1, padded_vocab_size=24)
PARAMS = tiny_pair.random_params(CONFIG, 7)


@pytest.fixture
def folder(tmp_path):
  save_model(str(tmp_path / "model"), CONFIG, PARAMS)
  return tmp_path / "model"


def flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


def rewrite(folder, change):
  """Apply `change` to the stored parameters."""
  file = folder / "params.msgpack"
  params = flat(serialization.msgpack_restore(file.read_bytes()))
  change(params)
  params = traverse_util.unflatten_dict(params, sep="/")
  file.write_bytes(serialization.msgpack_serialize(params))


def assert_rejected(folder, *words):
  """Assert that load_model raises InputError with a message that contains all of `words`."""
  with pytest.raises(InputError) as caught:
    load_model(str(folder))
  for word in words:
    assert word in str(caught.value)


@pytest.mark.parametrize("saved", [None, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_read_back(tmp_path, saved, dtype):
  """They are stored in their own dtype, or rounded to the dtype that is asked for."""
  save_model(str(tmp_path), CONFIG, PARAMS, dtype=saved)
  config, params = load_model(str(tmp_path), dtype)
  assert config == CONFIG.with_layout(dtype=jnp.dtype(dtype))
  want = jax.tree.map(lambda x: x.astype(saved or x.dtype).astype(dtype), PARAMS)
  jax.tree.map(np.testing.assert_array_equal, params, want)
  assert all(x.dtype == jnp.dtype(dtype) for x in jax.tree.leaves(params))
  size = sum(x.size for x in jax.tree.leaves(PARAMS)) * (2 if saved else 4)
  assert size < (tmp_path / "params.msgpack").stat().st_size < size + 4096


def test_saving_a_loaded_model_writes_the_same_files(folder, tmp_path):
  config, params = load_model(str(folder))
  save_model(str(tmp_path / "again"), config, params)
  for name in ("config.json", "params.msgpack"):
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_training_settings_are_not_saved(tmp_path):
  save_model(str(tmp_path), dataclasses.replace(CONFIG, dropout_rate=0.3), PARAMS)
  assert load_model(str(tmp_path))[0] == CONFIG


def test_model_fused_for_decoding_can_be_saved(tmp_path):
  fused = for_decoding(CONFIG, PARAMS)
  save_model(str(tmp_path), *fused)
  config, params = load_model(str(tmp_path))
  assert config == fused[0] and flat(params).keys() == flat(fused[1]).keys()


# Invalid models.


@pytest.mark.parametrize(
  "missing, said", [("config.json", "is damaged or missing"), ("params.msgpack", "has neither")]
)
def test_missing_files_are_reported(folder, missing, said):
  (folder / missing).unlink()
  assert_rejected(folder, said, str(folder))


def test_missing_folder_is_reported(tmp_path):
  assert_rejected(tmp_path / "gone", "no model in", "gone")


def test_unknown_dtype_is_reported(folder):
  with pytest.raises(InputError, match="dtype is 'float16'; use 'float32' or 'bfloat16'"):
    load_model(str(folder), "float16")


def test_arrays_of_other_shapes_are_named(folder):
  one = "decoder/layers_0/mlp/wo/kernel"
  rewrite(folder, lambda params: params.update({one: params[one][:-1]}))
  assert_rejected(folder, "1 arrays differ", one, "(31, 16)", "(32, 16)")


def test_missing_and_surplus_arrays_are_named(folder):
  one = "encoder/encoder_norm/scale"
  rewrite(folder, lambda params: params.pop(one))
  assert_rejected(folder, one, "found nothing", "expected (16,)")
  save_model(str(folder), CONFIG, PARAMS)
  rewrite(folder, lambda params: params.update({"decoder/surplus": np.zeros(3, np.float32)}))
  assert_rejected(folder, "decoder/surplus", "found (3,)", "expected nothing")


def test_parameters_of_another_config_are_rejected(folder, tmp_path):
  other = dataclasses.replace(CONFIG, gated=False)
  save_model(str(tmp_path / "other"), other, tiny_pair.random_params(other, 0))
  os.replace(tmp_path / "other" / "config.json", folder / "config.json")
  assert_rejected(folder, "does not fit the shape of the model", "mlp/wi")


@pytest.mark.parametrize(
  "damage",
  [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: raw[:-1], lambda raw: b"\xc1abc"]
  + [lambda raw: raw + raw, lambda raw: serialization.msgpack_serialize([1, 2])],
  ids=["empty", "half", "a byte short", "not msgpack", "twice", "not a map"],
)
def test_damaged_parameters_are_reported(folder, damage):
  file = folder / "params.msgpack"
  file.write_bytes(damage(file.read_bytes()))
  assert_rejected(folder, "params.msgpack")


# Failed saves.


@pytest.mark.parametrize("full", ["params.msgpack", "config.json"])
def test_failed_save_keeps_the_old_model_and_leaves_no_files(folder, monkeypatch, full):
  """The disk is full when the file `full` is synced."""
  before = {file.name: file.read_bytes() for file in folder.iterdir()}
  fsync = os.fsync

  def fail(fd):
    if full in os.readlink(f"/proc/self/fd/{fd}"):
      raise OSError(errno.ENOSPC, "No space left on device")
    fsync(fd)

  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(OSError):
    save_model(str(folder), CONFIG, jax.tree.map(lambda x: 2 * x, PARAMS))
  monkeypatch.undo()
  assert sorted(file.name for file in folder.iterdir()) == sorted(before)
  assert (folder / full).read_bytes() == before[full]
  load_model(str(folder))


def test_failed_first_save_leaves_no_model(tmp_path, monkeypatch):
  def fail(*args):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "replace", fail)
  with pytest.raises(OSError):
    save_model(str(tmp_path / "model"), CONFIG, PARAMS)
  assert_rejected(tmp_path / "model", "no model in")
