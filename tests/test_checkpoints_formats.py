"""Test that every checkpoint format gives the same parameters, from local and remote files."""

import dataclasses
import functools
import http.server
import json
import os
import pathlib
import pickle
import shutil
import threading
import time
import tracemalloc
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
import tiny
import tiny_pair
from flax import serialization, traverse_util
from safetensors.numpy import save_file

from specdec_jax.checkpoints import checkpoint, files
from specdec_jax.checkpoints.checkpoint import param_shapes
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core import memory
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.models.families import for_decoding
from specdec_jax.models.sizes import t5_config

GATED = tiny.config(vocab_size=128, layers=2, num_decoder_layers=3)
TIED = tiny.config(vocab_size=128, layers=1, gated=False, activation="relu", tied_logits=True)
CONFIGS = {"1.1": GATED, "1.0": TIED}


@functools.cache
def params(config):
  return jax.device_get(tiny_pair.random_params(config, 5))


def flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


# Writers of each format, with the arguments (folder to write to, config, tree of parameters).


def write_zarr(folder, config, tree, driver="file"):
  """Write a T5X checkpoint: an index with one inline array, and one zarr folder per other array."""
  path = folder / "checkpoint_1000"
  path.mkdir(parents=True)
  index = {}
  for name, array in flat(tree).items():
    inside = "target." + name.replace("/", ".")
    chunks = [max(1, size // 2) for size in array.shape]
    metadata = {"shape": array.shape, "chunks": chunks, "compressor": {"id": "gzip", "level": 1}}
    store = {"driver": "file", "path": f"{path}/{inside}/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "dtype": array.dtype.name}
    tensorstore.open(spec, create=True).result().write(array).result()
    index[name] = {**spec, "kvstore": {"driver": driver, "path": inside}}
  index["encoder/encoder_norm/scale"] = flat(tree)["encoder/encoder_norm/scale"]
  index = traverse_util.unflatten_dict(index, sep="/")
  state = {"step": np.int32(1000), "param_states": tree}
  saved = {"version": 3, "optimizer": {"target": index, "state": state}}
  (path / "checkpoint").write_bytes(serialization.to_bytes(saved))
  return path


def write_msgpack(folder, config, tree):
  """Write a checkpoint of an old version of T5X, with all arrays in one file."""
  folder.mkdir(parents=True)
  saved = {"version": 3, "optimizer": {"target": tree, "state": {"step": 1, "param_states": tree}}}
  (folder / "checkpoint_1").write_bytes(serialization.to_bytes(saved))
  return folder / "checkpoint_1"


def write_orbax(folder, config, tree, **options):
  handler = ocp.PyTreeCheckpointHandler(**options)
  ocp.Checkpointer(handler).save(folder.absolute(), jax.tree.map(jnp.asarray, tree))
  return folder


def write_training(folder, config, tree):
  """Write a train state as `train.trainer` does."""
  tree = jax.tree.map(jnp.asarray, tree)
  with ocp.CheckpointManager(folder.absolute()) as manager:
    manager.save(7, args=ocp.args.StandardSave({"params": tree, "opt_state": (tree, jnp.ones(2))}))
  return folder / "7"


def hf_tensors(config, tree):
  """Return the parameters with the names and axes of transformers."""
  names = flat(tree)
  tensors = {"shared.weight": names["token_embedder/embedding"]}
  if not config.tied_logits:
    tensors["lm_head.weight"] = names["decoder/logits_dense/kernel"].T
  blocks = {
    "encoder": {"attention": "SelfAttention", "mlp": "DenseReluDense"},
    "decoder": {
      "self_attention": "SelfAttention",
      "encoder_decoder_attention": "EncDecAttention",
      "mlp": "DenseReluDense",
    },
  }
  short = {"query": "q", "key": "k", "value": "v", "out": "o"}
  norms = {"self_attention": "self_attention", "encoder_decoder_attention": "cross_attention"}
  for stack, inside in blocks.items():
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tensors[bias] = names[f"{stack}/relpos_bias/rel_embedding"].T
    tensors[f"{stack}.final_layer_norm.weight"] = names[f"{stack}/{stack}_norm/scale"]
    for layer in range(getattr(config, f"num_{stack}_layers")):
      for i, (ours, theirs) in enumerate(inside.items()):
        at, part = f"{stack}/layers_{layer}", f"{stack}.block.{layer}.layer.{i}"
        norm = f"pre_{norms.get(ours, ours)}_layer_norm"
        tensors[f"{part}.layer_norm.weight"] = names[f"{at}/{norm}/scale"]
        for name, kernel in tree[stack][f"layers_{layer}"][ours].items():
          tensors[f"{part}.{theirs}.{short.get(name, name)}.weight"] = kernel["kernel"].T
  return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def hf_config(config):
  return {
    "model_type": "t5",
    "vocab_size": config.vocab_size,
    "d_model": config.emb_dim,
    "d_kv": config.head_dim,
    "d_ff": config.mlp_dim,
    "num_heads": config.num_heads,
    "num_layers": config.num_encoder_layers,
    "num_decoder_layers": config.num_decoder_layers,
    "feed_forward_proj": "gated-gelu" if config.gated else "relu",
    "tie_word_embeddings": config.tied_logits,
  }


def write_hf(folder, config, tree, num_files=1):
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(hf_config(config)))
  tensors = hf_tensors(config, tree)
  if num_files == 1:
    save_file(tensors, folder / "model.safetensors")
    return folder
  where = {n: f"model-{i % num_files + 1:05}-of.safetensors" for i, n in enumerate(tensors)}
  for file in set(where.values()):
    save_file({n: tensors[n] for n in tensors if where[n] == file}, folder / file)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
  return folder


def write_own(folder, config, tree):
  save_model(str(folder), config, jax.tree.map(jnp.asarray, tree))
  return folder


FORMATS = {
  "t5x zarr": write_zarr,
  "t5x msgpack": write_msgpack,
  "orbax": write_orbax,
  "orbax zarr3": functools.partial(write_orbax, use_zarr3=True),
  "orbax folders": functools.partial(write_orbax, use_ocdbt=False),
  "orbax state": write_training,
  "hf": write_hf,
  "hf files": functools.partial(write_hf, num_files=3),
  "own": write_own,
}


@functools.cache
def checkpoint_path(format, version, dtype="float32"):
  """Return the path of a checkpoint in this format, which is written once."""
  folder = tiny_pair.folder() / "formats" / f"{format} {version} {dtype}".replace(" ", "_")
  folder.parent.mkdir(exist_ok=True)
  tree = jax.tree.map(lambda x: x.astype(dtype), params(CONFIGS[version]))
  return str(FORMATS[format](folder, CONFIGS[version], tree))


@pytest.fixture
def copy_of(tmp_path):
  """Return a function that copies a T5 1.1 checkpoint of a given format, to be modified."""

  def copy(format):
    path = pathlib.Path(checkpoint_path(format, "1.1"))
    if path.is_file():
      return pathlib.Path(shutil.copy(path, tmp_path))
    return pathlib.Path(shutil.copytree(path, tmp_path / path.name))

  return copy


def assert_same(got, want):
  """Assert that two trees have the same names, dtypes and bits."""
  got, want = flat(got), flat(want)
  assert got.keys() == want.keys()
  for name in want:
    assert got[name].dtype == want[name].dtype, name
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]), name)


def rounded(tree, *dtypes):
  for dtype in dtypes:
    tree = jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: B023
  return tree


@pytest.mark.slow
@pytest.mark.parametrize("version", CONFIGS)
@pytest.mark.parametrize("format", FORMATS)
def test_config_and_parameters_are_read(format, version):
  config = CONFIGS[version]
  path = checkpoint_path(format, version)
  assert open_checkpoint(path).config == config
  want = params(config)
  assert_same(open_checkpoint(path).load(config), want)
  assert_same(open_checkpoint(path).load(config, jnp.bfloat16), rounded(want, jnp.bfloat16))
  fused, laid_out = for_decoding(config, jax.tree.map(jnp.asarray, want))
  assert_same(open_checkpoint(path).load(fused), laid_out)


@pytest.mark.parametrize("format", ["t5x zarr", "t5x msgpack", "orbax", "hf"])
def test_checkpoint_in_bfloat16(format):
  path = checkpoint_path(format, "1.0", "bfloat16")
  want = rounded(params(TIED), jnp.bfloat16)
  assert_same(open_checkpoint(path).load(TIED, jnp.bfloat16), want)
  want = rounded(want, np.float32)
  assert_same(open_checkpoint(path).load(TIED), want)
  fused, laid_out = for_decoding(TIED, jax.tree.map(jnp.asarray, want))
  assert_same(open_checkpoint(path).load(fused), laid_out)  # not divided in the stored dtype


def test_arrays_that_flax_saves_in_chunks(tmp_path, monkeypatch):
  """Flax splits arrays of more than 1 GB, a limit that this test reduces."""
  monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
  path = write_msgpack(tmp_path / "pieces", GATED, params(GATED))
  assert b"__msgpack_chunked_array__" in path.read_bytes()
  assert_same(open_checkpoint(str(path)).load(GATED), params(GATED))


@pytest.mark.parametrize("format", FORMATS)
def test_slices_of_arrays_are_read(format):
  """Each of several devices reads one slice of an array."""
  arrays = open_checkpoint(checkpoint_path(format, "1.1")).arrays
  for name in (
    "encoder/layers_1/mlp/wo/kernel",
    "decoder/logits_dense/kernel",
    "decoder/relpos_bias/rel_embedding",
  ):
    whole = arrays[name].read()
    assert whole.shape == arrays[name].shape and whole.dtype == arrays[name].dtype
    for index in ((slice(1, 2), slice(None)), (slice(None), slice(8, 16)), (slice(0, 1),) * 2):
      np.testing.assert_array_equal(arrays[name].read(index), whole[index])


@pytest.mark.parametrize("format", ["t5x zarr", "hf", "own"])
def test_parameters_have_the_given_shardings(format):
  mesh = jax.make_mesh((1,), ("model",))
  wanted = []

  def shardings(shapes, config):
    assert config == GATED

    def spec(leaf):
      return jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), "model")

    wanted.append(jax.tree.map(lambda x: jax.sharding.NamedSharding(mesh, spec(x)), shapes))
    return wanted[0]

  path = checkpoint_path(format, "1.1")
  got = open_checkpoint(path).load(GATED, shardings=shardings)
  assert_same(got, open_checkpoint(path).load(GATED))
  assert jax.tree.map(lambda x: x.sharding, got) == wanted[0]
  assert_same(open_checkpoint(path).load(GATED, shardings=wanted[0]), got)


# Peak memory.


WIDE = tiny.config(vocab_size=4096, layers=4, emb_dim=128, mlp_dim=1024)


def traced_peak(load):
  """Return the peak memory of Python and numpy during `load`, divided by the size of the arrays."""
  tracemalloc.start()
  try:
    tree = load()
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  return peak / sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["as stored", "fused"])
@pytest.mark.parametrize("format", ["t5x zarr", "t5x msgpack", "orbax", "hf", "own"])
def test_no_file_is_read_into_memory_as_a_whole(tmp_path, format, fused):
  path = str(FORMATS[format](tmp_path / "wide", WIDE, params(WIDE)))
  config = WIDE.with_layout(fused=fused)
  param_shapes(WIDE), param_shapes(config)
  assert traced_peak(lambda: open_checkpoint(path).load(config)) < 1.5


def test_peak_memory_shows_a_file_read_as_a_whole(tmp_path):
  path = write_msgpack(tmp_path / "wide", WIDE, params(WIDE))

  def load_at_once():
    tree = serialization.msgpack_restore(path.read_bytes())["optimizer"]["target"]
    return jax.tree.map(np.array, tree)

  assert traced_peak(load_at_once) > 2


# Remote files.


class Bucket(http.server.BaseHTTPRequestHandler):
  """Server of objects, byte ranges and lists, the part of Google Cloud Storage for tensorstore."""

  def do_GET(self):
    url = urllib.parse.urlparse(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    root, _, name = url.path.removeprefix("/storage/v1/b/").partition("/o")
    status, body, headers = self.answer(self.server.root, urllib.parse.unquote(name[1:]), query)
    self.send_response(status)
    for key, value in {"content-length": len(body), "x-goog-generation": 1, **headers}.items():
      self.send_header(key, str(value))
    self.end_headers()
    self.wfile.write(body)

  def answer(self, root, name, query):
    if not name:
      found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
      start, end = query.get("startOffset", ""), query.get("endOffset", chr(0x10FFFF))
      items = [{"name": name} for name in found if start <= name < end]
      return 200, json.dumps({"items": items}).encode(), {}
    if not (root / name).is_file():
      return 404, b"", {}
    body = (root / name).read_bytes()
    if "range" not in self.headers:
      return 200, body, {}
    first, last = self.headers["range"].removeprefix("bytes=").split("-")
    part = body[int(first) : int(last) + 1 if last else None]
    if not part:
      return 416, b"", {}
    end = int(first) + len(part) - 1
    return 206, part, {"content-range": f"bytes {first}-{end}/{len(body)}"}

  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def bucket():
  """Serve a folder of checkpoints as Google Cloud Storage does, and return the server."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
  server.root = tiny_pair.folder()
  threading.Thread(target=server.serve_forever, daemon=True).start()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    yield server.root
  server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_checkpoint_in_a_bucket(bucket, monkeypatch, format):
  local = checkpoint_path(format, "1.1")
  remote = f"gs://some-bucket/{pathlib.Path(local).relative_to(bucket)}"
  size = (pathlib.Path(local) / "model.safetensors" if format == "hf" else bucket).stat().st_size
  monkeypatch.setattr(files, "_BLOCK", size // 4 if format == "hf" else 1000)
  assert_same(open_checkpoint(remote).load(GATED), open_checkpoint(local).load(GATED))


@pytest.mark.parametrize("bytes_more", [-1, 0, 1])
def test_remote_file_is_copied_completely(bucket, monkeypatch, bytes_more):
  """The last block may have any size, including none."""
  monkeypatch.setattr(files, "_BLOCK", 100)
  content = os.urandom(300 + bytes_more)
  (bucket / "bytes").write_bytes(content)
  with files.local_copy("gs://some-bucket", "bytes") as path:
    assert pathlib.Path(path).read_bytes() == content
  assert not os.path.exists(path)


def test_missing_checkpoint_in_a_bucket_is_reported(bucket):
  assert_rejected("gs://some-bucket/formats/gone", "There is no model in", "gone")
  zarr = pathlib.Path(checkpoint_path("t5x zarr", "1.1")).parent
  assert_rejected(
    f"gs://some-bucket/{zarr.relative_to(bucket)}", "name one of checkpoint_1000 in it"
  )


def test_a_bucket_that_does_not_answer_is_reported(bucket, monkeypatch):
  monkeypatch.setattr(files, "_SECONDS", 0.0)
  assert_rejected("gs://some-bucket/formats/t5x", "cannot be read: no answer within")


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached_is_reported_within_a_minute(monkeypatch):
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")  # nothing listens there
  since = time.perf_counter()
  assert_rejected(
    "gs://no-bucket/model", "gs://no-bucket/model cannot be read: ", "retry attempts failed"
  )
  assert time.perf_counter() - since < 60


# Errors.


def assert_rejected(path, *words, config=GATED):
  with pytest.raises(InputError) as caught:
    open_checkpoint(str(path)).load(config)
  for word in words:
    assert word in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_model_larger_than_memory_is_rejected_without_reading_it(monkeypatch, format):
  """The size of the model is computed from the shapes of its arrays and the dtype to load."""
  monkeypatch.setattr(checkpoint, "_place", lambda *_: None)  # the check precedes reading
  path, size = checkpoint_path(format, "1.1"), sum(x.size for x in jax.tree.leaves(params(GATED)))
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 4 * size - 1)
  assert_rejected(
    path, f"the model in {path}", " would take at least ", "; load a smaller one, or in bfloat16."
  )
  open_checkpoint(path).load(GATED, jnp.bfloat16)
  with pytest.raises(InputError, match="with its target would take at least"):
    open_checkpoint(path).load(GATED, jnp.bfloat16, other_arrays=np.zeros(size, np.float32))
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 4 * size)
  open_checkpoint(path).load(GATED)


def test_memory_check_includes_both_models_of_a_pair(monkeypatch):
  folder = tiny_pair.folder()
  size = sum(x.nbytes for x in jax.tree.leaves(tiny_pair.pair().target.params))
  load = functools.partial(load_pair, str(folder / "target"), str(folder / "near"))
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 1.5 * size)
  with pytest.raises(InputError, match="near with its target would take at least"):
    load(str(folder / "vocabulary.model"))


@pytest.mark.parametrize("format", FORMATS)
def test_differing_arrays_are_named(format):
  wrong = dataclasses.replace(GATED, num_encoder_layers=1, mlp_dim=64, gated=False)
  assert_rejected(
    checkpoint_path(format, "1.1"),
    "arrays differ",
    "decoder/layers_0/mlp/wo/kernel (found (32, 16), expected (64, 16))",
    "decoder/layers_0/mlp/wi/kernel (found nothing, expected (16, 64))",
    "decoder/layers_0/mlp/wi_0/kernel (found (16, 32), expected nothing)",
    " more",
    config=wrong,
  )


def test_integer_arrays_are_rejected(tmp_path):
  tree = rounded(params(GATED), np.int8)
  assert_rejected(write_zarr(tmp_path, GATED, tree), "('int8', 16)", "expected (16,)")
  path = write_hf(tmp_path / "hf", GATED, tree)
  assert_rejected(path, "('int8', 16)", "expected (16,)")


def test_unknown_parameter_name_is_reported(copy_of):
  path = copy_of("hf")
  tensors = hf_tensors(GATED, params(GATED))
  save_file({**tensors, "adapter.weight": np.ones(3, np.float32)}, path / "model.safetensors")
  assert_rejected(path, "adapter.weight (found (3,), expected nothing)")


@pytest.mark.parametrize("kept", ["shared", "encoder.embed_tokens", "decoder.embed_tokens"])
def test_embedding_table_is_found_by_each_of_its_names(copy_of, kept):
  path = copy_of("hf")
  tensors = hf_tensors(GATED, params(GATED))
  tensors[f"{kept}.weight"] = tensors.pop("shared.weight")
  never_used = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
  save_file({**tensors, never_used: np.ones((32, 2), np.float32)}, path / "model.safetensors")
  assert_same(open_checkpoint(str(path)).load(GATED), params(GATED))


def test_tied_logits_without_scaling(copy_of):
  """transformers 5 stores no matrix for tied logits; a separate field states their scaling."""
  path = copy_of("hf")
  tensors = hf_tensors(GATED, params(GATED))
  del tensors["lm_head.weight"]
  save_file(tensors, path / "model.safetensors")
  about = hf_config(GATED) | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
  (path / "config.json").write_text(json.dumps(about))
  got = open_checkpoint(str(path)).load(GATED)
  table = params(GATED)["token_embedder"]["embedding"]
  np.testing.assert_array_equal(got["decoder"]["logits_dense"]["kernel"], table.T)


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("model_type", "longt5", "'t5'"),
    ("feed_forward_proj", "gelu", "'gated-gelu'"),
    ("relative_attention_num_buckets", 64, "32"),
    ("layer_norm_epsilon", 1e-5, "1e-06"),
  ],
)
def test_unsupported_models_are_rejected(copy_of, field, value, said):
  path = copy_of("hf")
  about = {k: v for k, v in (hf_config(GATED) | {field: value}).items() if v is not None}
  (path / "config.json").write_text(json.dumps(about))
  assert_rejected(path, "config.json", field, said)


class Bomb:
  def __reduce__(self):
    return os.mkdir, ("exploded",)


def test_pickled_files_are_not_read(copy_of, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  bomb = pickle.dumps(Bomb())
  path = copy_of("hf")
  (path / "model.safetensors").unlink()
  (path / "pytorch_model.bin").write_bytes(bomb)
  assert_rejected(path, "pickled", "save_pretrained")
  (path / "model.safetensors").write_bytes(bomb)
  assert_rejected(path, "model.safetensors is damaged")
  for format, file in (("t5x msgpack", ""), ("t5x zarr", "checkpoint"), ("own", "params.msgpack")):
    path = copy_of(format)
    (path / file).write_bytes(bomb)
    assert_rejected(path, "is damaged")
  assert not os.path.exists("exploded")
  pickle.loads(bomb)
  assert os.path.exists("exploded")  # unpickling would have been noticed


DAMAGES = {
  "a chunk is gone": ("t5x zarr", "target.decoder.layers_0.mlp.wo.kernel/1.0", None),
  "half a chunk": ("t5x zarr", "target.decoder.layers_0.mlp.wo.kernel/1.0", 0.5),
  "an array is gone": ("t5x zarr", "target.decoder.layers_0.mlp.wo.kernel/.zarray", None),
  "half an index": ("t5x zarr", "checkpoint", 0.5),
  "half a file": ("t5x msgpack", "", 0.5),
  "an array of Orbax is gone": ("orbax folders", "decoder.layers_0.mlp.wo.kernel/.zarray", None),
  "half a database": ("orbax", "manifest.ocdbt", 0.5),
  "half of safetensors": ("hf", "model.safetensors", 0.5),
  "nothing of safetensors": ("hf", "model.safetensors", 0),
  "one of three is gone": ("hf files", "model-00002-of.safetensors", None),
  "half a list of files": ("hf files", "model.safetensors.index.json", 0.5),
  "half a config": ("hf", "config.json", 0.5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_reported(copy_of, damage):
  format, file, share = DAMAGES[damage]
  path = copy_of(format)
  file = path / file
  content = file.read_bytes()
  file.unlink()
  if share is not None:
    file.write_bytes(content[: int(len(content) * share)])
  assert_rejected(path, path.name, "damaged")


def test_several_steps_and_unfinished_steps_are_reported(copy_of, tmp_path):
  path = copy_of("t5x zarr")
  for name in ("checkpoint_2000", "checkpoint_3000.tmp-1700000000"):
    shutil.copytree(path, tmp_path / name)
  assert_rejected(
    tmp_path, "There is no model in", "name one of checkpoint_1000, checkpoint_2000 in it"
  )
  assert_rejected(tmp_path / "checkpoint_3000.tmp-1700000000", "never finished")
  (path / "checkpoint").unlink()  # T5X writes this file last
  assert_rejected(path, "There is no model in", "expected")
  state = pathlib.Path(checkpoint_path("orbax state", "1.1"))
  assert_rejected(state.parent, "name one of 7 in it")
  assert_rejected(tmp_path / "gone", "There is no model in")


def test_checkpoint_without_a_t5_is_reported(tmp_path):
  path = write_orbax(tmp_path / "other", None, {"dense": {"kernel": np.ones((2, 3), np.float32)}})
  assert_rejected(path, "contains no T5", "dense/kernel")
  tree = flat(params(GATED))
  del tree["encoder/relpos_bias/rel_embedding"]
  path = write_msgpack(tmp_path / "half", None, traverse_util.unflatten_dict(tree, sep="/"))
  assert_rejected(path, "encoder/relpos_bias/rel_embedding")


@pytest.mark.parametrize("write", [write_zarr, write_msgpack])
def test_scanned_layers_are_named(tmp_path, write):
  """A `scalable_t5` has one array for all layers."""
  tree = {name: array for name, array in flat(params(GATED)).items() if "/layers_" not in name}
  for stack in ("encoder", "decoder"):
    tree[f"{stack}/{stack}/mlp/wo/kernel"] = np.ones((4, 2, 3), np.float32)
  path = write(tmp_path / "t5x", None, traverse_util.unflatten_dict(tree, sep="/"))
  assert_rejected(path, "does not have the arrays of a T5", "scalable_t5, with scanned layers")


@pytest.mark.skipif(
  not (tiny.SHARED / "data/t5x_testdata").is_dir(), reason="T5X's test data is not there"
)
def test_checkpoint_of_the_tests_of_t5x():
  path = tiny.SHARED / "data/t5x_testdata/test_t5_tiny.checkpoint_0"
  config = open_checkpoint(str(path)).config
  published = t5_config("tiny", "1.1", vocab_size=32128, padded_vocab_size=None)
  assert config == published
  want = serialization.msgpack_restore(path.read_bytes())["optimizer"]["target"]
  assert_same(open_checkpoint(str(path)).load(config), want)
