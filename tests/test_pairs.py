"""Test loading of pairs and its errors, and conversion of texts and of parameters for decoding."""

import dataclasses
import os
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
import tiny_pair
from flax import serialization
from sentencepiece import sentencepiece_model_pb2
from test_checkpoints_formats import write_hf
from tiny import speculative_decode
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specdec_jax
from specdec_jax.checkpoints.load import load_model, open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.pieces import EOS_ID, SentencePieces
from specdec_jax.data.vocabularies import (
  open_vocabulary,
  open_vocabulary_of_model,
  padded_size,
)
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.drafts.uniform import uniform
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.measure.records import settings_to_measure
from specdec_jax.models import sizes
from specdec_jax.models.families import for_decoding, init_params
from specdec_jax.models.kernels import skinny
from specdec_jax.models.sizes import t5_config
from specdec_jax.random_models import random_pair
from specdec_jax.run import main

PARTS = dict(target="target", draft="near")


def load(folder=None, **changes):
  """Load the tiny pair with changes; `folder` contains the changed files."""
  names = dict(PARTS, vocabulary="vocabulary.model")
  settings = {k: v for k, v in changes.items() if k not in names}
  paths = {k: str(tiny_pair.folder() / name) for k, name in names.items()}
  paths |= {k: str((folder or tiny_pair.folder()) / changes[k]) for k in names if k in changes}
  return load_pair(**paths, **settings)


def test_load_pair():
  pair = load(task="tiny", max_source_tokens=20)
  assert (pair.target.name, pair.draft.name, pair.task) == ("target", "near", "tiny")
  assert pair.target.model.vocab_size == len(pair.vocabulary) == 72
  assert pair.max_source_tokens == 20
  for dtype in ("float32", "bfloat16"):
    pair = load(dtype=dtype)
    assert pair.dtype == dtype
    target = dict(pair.target.params)
    table = target.pop("token_embedder")["embedding"]
    assert table.dtype == pair.layout.activations
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype(dtype)}
    # With kernels, matrices of a draft are int8 in bfloat16, and otherwise remain as stored.
    kernel = pair.draft.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    kept = "bfloat16" if dtype == "float32" else "int8"
    assert kernel.dtype == (kept if skinny.is_available(jnp.dtype(dtype)) else dtype)


@pytest.mark.slow
def test_kernels_for_gpus_have_the_outputs_of_xla():
  """The bundled pair drafts with a head. On a CPU, differences are rounding errors."""
  sources, outputs = ["Ein Hund rennt.", "Zwei Kinder spielen im Schnee."], []
  for kernels in "xla", "gpu":
    pair = load_pair(kernels=kernels)
    assert pair.kernels == kernels
    for gamma in 0, 3:
      decoded = pair.generate(sources, gamma=gamma, max_new_tokens=12, temperature=0)
      outputs.append([output.text for output in decoded])
  assert outputs[1:] == outputs[:1] * 3
  layer = pair.target.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  assert layer.shape == (pair.config.emb_dim, pair.config.mlp_dim)


def test_pair_of_own_models_has_no_task_and_records_its_paths():
  paths = {role: str(tiny_pair.folder() / name) for role, name in PARTS.items()}
  pair = load_pair(**paths)
  assert (pair.task, pair.target.path, pair.draft.path) == (None, *paths.values())
  (setting,) = settings_to_measure(pair, ["A man"], [DecodeSettings(Sampling())], [3])
  assert setting.subject == "{target} with {draft}".format(**paths)
  assert pair.with_draft(uniform(pair.target)).draft.path is None
  alone = load_pair(paths["target"])  # not with the bundled pair's draft, of another vocabulary
  assert alone.draft.name == prompt_lookup(alone.target).name


def test_bundled_pair_has_its_task():
  pair = load_pair(draft=uniform)
  assert (pair.task, pair.target.path) == (
    "multi30k_ende",
    "specdec_jax/assets/multi30k_ende/target",
  )


@pytest.mark.parametrize("role", ["target", "draft"])
def test_models_with_another_vocabulary_raise(role):
  with pytest.raises(InputError) as caught:
    load(**{role: "small"})
  for words in (f"The {role} in ", "small", "60 tokens", "has 72", "must agree"):
    assert words in str(caught.value)
  assert "bundled" not in str(caught.value)
  with pytest.raises(InputError, match="without --target, the target is the bundled one[.]$"):
    load_pair(draft=str(tiny_pair.folder() / "small"))


@pytest.mark.parametrize("role", ["target", "draft", "vocabulary"])
def test_missing_files_are_named(role):
  with pytest.raises(InputError, match="gone"):
    load(**{role: "gone"})


def test_target_and_draft_of_two_architectures_raise(tmp_path):
  parts = tiny_pair.folder()
  cfg = tiny.gpt_config(vocab_size=72, layers=1)
  save_model(str(tmp_path), cfg, tiny_pair.random_params(cfg, 0))
  with pytest.raises(InputError, match="is an encoder-decoder and .* is decoder-only"):
    load_pair(str(parts / "target"), str(tmp_path), str(parts / "vocabulary.model"))


@pytest.mark.parametrize("config", [tiny.config, tiny.gpt_config])
@pytest.mark.parametrize(
  "eos_id, said", [(0, "pads prompts"), (7, "token 7 but .* with 3; target")]
)
def test_eos_of_a_config_is_compared_with_the_vocabulary(
  tmp_path, monkeypatch, config, eos_id, said
):
  """The model's EOS is its padding, or not the vocabulary's EOS."""
  cfg = config(vocab_size=72, layers=1, eos_id=eos_id)
  params = tiny_pair.random_params(cfg, 0)
  save_model(str(tmp_path), cfg, params)
  monkeypatch.setattr(SentencePieces, "eos_id", eos_id and 3)
  for model in (str(tmp_path), (cfg, params)):
    with pytest.raises(InputError, match=said):
      load_pair(model, vocabulary=str(tiny_pair.folder() / "vocabulary.model"))


def test_eos_of_any_vocabulary_ends_the_prompt_of_a_random_pair(monkeypatch):
  monkeypatch.setitem(sizes._FAMILIES["gpt2"], "tiny", (8, 2, 4, 16, 1))
  pair = random_pair("tiny", "tiny", 0.5, "gpt2")
  texts = "A man is riding a horse.", "Two dogs."
  _, lengths = pair.target.model.prompt_tokens(pair.prompt(texts))
  assert lengths.tolist() == [len(pair.encode(text)) - 1 for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("family, size", [("bart", "tiny"), ("t5gemma", "tiny-tiny")])
def test_random_pair_of_another_family_accepts_all_draft_tokens(monkeypatch, family, size):
  monkeypatch.setitem(sizes._FAMILIES["bart"], "tiny", (8, 2, 4, 16, 1, 1))
  monkeypatch.setitem(sizes._GEMMA_STACKS, "tiny", (8, 2, 1, 4, 16, 2))
  monkeypatch.setitem(sizes._FAMILIES["t5gemma"], "tiny-tiny", ())
  pair = specdec_jax.random_pair(size, size, 1.0, family)
  assert pair.target.name == f"{family}_{size}" and pair.draft.name == f"{family}_{size}"
  output = pair.generate(["A man is riding a horse."], gamma=3, max_new_tokens=16)[0]
  assert len(output.tokens) == 16 and output.acceptance_length == 4


@pytest.mark.parametrize("path", ["t5_tiny/checkpoint_1000", "t5_tiny/checkpoints/7/default"])
def test_checkpoints_of_t5x_and_orbax(tmp_path, path):
  """Embedding tables are padded from 72 tokens to 128 rows, and padded rows are never emitted."""
  rows = tiny.config(vocab_size=128, layers=1, tied_logits=True, gated=False, activation="relu")
  params = tiny_pair.random_params(rows, 0)
  if path.endswith("checkpoint_1000"):
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "checkpoint").write_bytes(serialization.to_bytes({"target": params}))
  else:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / path, {"params": params})
  for role in ("target", "draft"):
    pair = load(**{role: path}, folder=tmp_path, kernels="xla")
    assert getattr(pair, role).name == "t5_tiny"
    config = dataclasses.replace(rows, vocab_size=72, padded_vocab_size=128)
    want = for_decoding(config, params)[1]
    jax.tree.map(np.testing.assert_array_equal, getattr(pair, role).params, want)
    assert pair.target.model.vocab_size == 72


def test_embedding_table_of_another_vocabulary_is_not_padding(tmp_path):
  for rows in (64, 73, 384):  # a table may have some more rows than tokens
    config = tiny.config(vocab_size=rows, layers=1)
    save_model(str(tmp_path / f"{rows}"), config, tiny_pair.random_params(config, 0))
    if rows == 73:
      assert load(target="73", draft="73", folder=tmp_path).target.model.vocab_size == 72
      continue
    with pytest.raises(InputError, match=f"{rows} tokens.* has 72, 0 extra_ids among them"):
      load(target=f"{rows}", folder=tmp_path)


def write_words(path, num_pieces):
  """Write a SentencePiece model of `num_pieces` pieces to a file."""
  model = sentencepiece_model_pb2.ModelProto()
  model.ParseFromString((tiny_pair.folder() / "vocabulary.model").read_bytes())
  for i in range(num_pieces - len(model.pieces)):
    model.pieces.add(piece=f"\u2581piece{i}", score=-20.0)
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
  ("num_pieces", "rows", "extra_ids"),
  [
    (72, 72, 0),
    (72, 128, 0),  # padded
    (72, 172, 100),
    (72, 256, 100),  # padded
    (32000, 32128, 100),  # T5
    (250100, 250112, 0),  # mT5, whose pieces include the sentinels
    (72, 300, 0),  # another vocabulary, which `load_for` rejects
  ],
)
def test_number_of_sentinels_follows_from_the_table(tmp_path, num_pieces, rows, extra_ids):
  path = tmp_path / "spiece.model"
  write_words(path, num_pieces)
  words = open_vocabulary_of_model(str(path), rows)
  assert (words.extra_ids, len(words)) == (extra_ids, num_pieces + extra_ids)
  assert open_vocabulary_of_model(str(path), rows, 3).extra_ids == 3


def test_sentinels_in_the_vocabulary_are_not_added_again(tmp_path):
  """The embedding table has rows for 100 more tokens, but the vocabulary already has sentinels."""
  path = tmp_path / "spiece.model"
  write_words(path, 128 - 100)
  model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
  model.pieces[-1].piece = "\u2581<extra_id_0>"
  path.write_bytes(model.SerializeToString())
  assert open_vocabulary_of_model(str(path), padded_size(len(model.pieces) + 100)).extra_ids == 0


def t5_folder(path, rows):
  """Write a T5 with `num_rows` rows as a Hugging Face folder."""
  config = tiny.config(vocab_size=rows, layers=1)
  return write_hf(path, config, tiny_pair.random_params(config, 0))


def test_t5_is_loaded_by_its_folder_alone(tmp_path):
  """The spiece.model has 32,000 pieces and the table 32,128 rows, as for T5 and Flan-T5."""
  folder = str(t5_folder(tmp_path / "hf", 32128))
  write_words(tmp_path / "hf" / "spiece.model", 32000)
  pair = load_pair(folder, folder)
  assert pair.target.model.vocab_size == 32100 == len(pair.vocabulary)
  assert pair.target.params["token_embedder"]["embedding"].shape == (32128, 16)
  assert pair.vocabulary.path == f"{folder}/spiece.model"
  assert load_pair(folder, folder, extra_ids=0).target.model.vocab_size == 32000


def test_draft_with_other_tokens_of_the_same_number_is_an_error(tmp_path):
  folders = [str(t5_folder(tmp_path / name, 128)) for name in ("one", "other")]
  for folder in folders:
    write_words(tmp_path / folder / "spiece.model", 72)
  assert load_pair(*folders, extra_ids=0).draft.name == "other"
  path = tmp_path / "other" / "spiece.model"
  model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
  for i in range(10, 20):
    model.pieces[i].piece += "x"
  path.write_bytes(model.SerializeToString())
  with pytest.raises(InputError, match="14% of them are others.*--draft other_vocabulary"):
    load_pair(*folders, extra_ids=0)


def test_prompt_that_is_too_long_loses_its_beginning():
  pair = tiny_pair.gpt_pair(max_source_tokens=8)
  ids = pair.vocabulary.encode(" ".join(tiny_pair.SENTENCES[:2]))
  assert len(ids) > 8 and pair.truncated(ids) == ids[-8:] and ids[-1] == pair.vocabulary.eos_id


def test_folder_with_only_tokenizer_json(tmp_path, capsys):
  """transformers 5 saves such a folder. It is loaded in Python and on the command line."""
  write_words(tmp_path / "words" / "spiece.model", 72)
  words = open_vocabulary(str(tmp_path / "words"), extra_ids=100)
  folder = str(t5_folder(tmp_path / "hf", 256))
  scores = [(piece, -float(i)) for i, piece in enumerate(words.all_pieces())]
  tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Metaspace()
  tokenizer.save(f"{folder}/tokenizer.json")
  pair = load_pair(folder, folder)
  assert len(pair.vocabulary) == 172 == pair.target.model.vocab_size
  with pytest.raises(InputError, match="extra_ids is 100, but .*tokenizer.json lists all"):
    load_pair(folder, folder, extra_ids=100)
  (tmp_path / "in.txt").write_text("A man\n")
  files = [f"--gin_file=gin/{name}.gin" for name in ("runs/translate", "models/checkpoints")]
  flags = dict(TARGET=folder, DRAFT=folder, INPUT=str(tmp_path / "in.txt"), MAX_NEW_TOKENS=2)
  try:
    flags = [f"--gin.{name}={value!r}" for name, value in flags.items()]
    assert not main(["run", "--jax_compilation_cache_dir=", *files, *flags, "--gin.GAMMA=0"])
  finally:
    gin.clear_config()
  assert len(capsys.readouterr().out.splitlines()) == 1


OWN_MODEL = """
from __gin__ import dynamic_registration
import tiny_pair
from specdec_jax import load
DRAFT = None
load.load_pair.target = @tiny_pair.config_and_params()
load.load_pair.vocabulary = @tiny_pair.open_vocabulary()
tiny_pair.open_vocabulary.path = {path!r}
"""


def test_gin_file_names_functions_that_return_a_model_and_its_vocabulary(tmp_path, capsys):
  """The model is (config, parameters), and the vocabulary an object."""
  (tmp_path / "own.gin").write_text(
    OWN_MODEL.format(path=str(tiny_pair.folder() / "vocabulary.model"))
  )
  (tmp_path / "in.txt").write_text(f"{tiny_pair.SENTENCES[0]}\n")
  files = ["--gin_file=gin/runs/translate.gin", f"--gin_file={tmp_path}/own.gin"]
  flags = [f"--gin.INPUT={str(tmp_path / 'in.txt')!r}", "--gin.MAX_NEW_TOKENS=5", "--gin.GAMMA=0"]
  try:
    assert not main(["run", "--jax_compilation_cache_dir=", *files, *flags])
  finally:
    gin.clear_config()
  (want,) = load().generate(tiny_pair.SENTENCES[:1], max_new_tokens=5, gamma=0)
  assert capsys.readouterr().out == f"{want.text}\n"


def test_vocabulary_defaults_to_the_targets(tmp_path):
  """The vocabulary is in the target's folder, or next to it for pairs of this project; the bundled
  pair's vocabulary is never used."""
  paths = {role: str(tiny_pair.folder() / name) for role, name in PARTS.items()}
  assert load_pair(**paths).vocabulary.path == str(tiny_pair.folder() / "vocabulary.model")
  folder = str(t5_folder(tmp_path / "hf", 4096))  # the size of the bundled vocabulary
  with pytest.raises(InputError, match="hf has no vocabulary with it; .* Give its file as vocab"):
    load_pair(folder, folder)


CUT = """
import functools, sys
import jax
from specdec_jax.models.partitioning import REPLICATED, make_mesh, param_shardings
from specdec_jax.load import load_pair
from specdec_jax.random_models import random_pair

mesh = make_mesh(model_parallel=2)
target, draft, vocabulary = sys.argv[1:]
shardings = functools.partial(param_shardings, mesh=mesh)
whole = functools.partial(param_shardings, mesh=mesh, rules=REPLICATED)
pair = load_pair(target, draft, vocabulary, shardings=shardings, draft_shardings=whole)
layer = pair.target.params["decoder"]["layers_0"]
kernel = layer["self_attention"]["query"]["kernel"]
assert {x.data.shape for x in kernel.addressable_shards} == {(16, 8)}, kernel.sharding
assert {x.data.shape for x in layer["mlp"]["wo"]["kernel"].addressable_shards} == {(16, 16)}
layer = pair.draft.params["decoder"]["layers_0"]
kernel = layer["self_attention"]["query_key_value"]["kernel"]
assert kernel.is_fully_replicated and len(kernel.addressable_shards) == 2
alone = load_pair(target, target, vocabulary, shardings=whole, draft_shardings=shardings)
both = jax.tree.leaves_with_path((pair.target.params, alone.draft.params))
assert all(len(x.addressable_shards) == 2 for _, x in both)
same = jax.tree.map(lambda x, y: bool((x == y).all()), pair.target.params, alone.draft.params)
assert all(jax.tree.leaves(same))
pair = random_pair("tiny", "tiny", 0.5, shardings=shardings, draft_shardings=whole)
kernel = pair.target.params["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
assert {x.data.shape for x in kernel.addressable_shards} == {(8, 6)}, kernel.sharding
assert pair.draft.params["decoder"]["logits_dense"]["kernel"].is_fully_replicated
"""


@pytest.mark.slow
def test_sharded_parameters_are_not_converted():
  paths = [str(tiny_pair.folder() / name) for name in ("target", "near", "vocabulary.model")]
  devices = "--xla_force_host_platform_device_count=2"
  flags = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"}
  subprocess.run([sys.executable, "-c", CUT, *paths], env=flags, check=True, timeout=300)


@pytest.mark.parametrize(
  ("family", "xl"),
  [("t5_1_0", "t5_3B/checkpoint_"), ("t5_1_1", "t5_1_1_xl/"), ("flan_t5", "flan_t5_xl/")],
)
def test_public_checkpoints_by_gin(monkeypatch, capsys, family, xl):
  """Both models are named by their sizes; the vocabulary is not in the folders of the bucket."""
  opened = []

  def open_tiny(path):
    opened.append(path)
    return open_checkpoint(str(tiny_pair.folder() / "target"))

  monkeypatch.setattr("specdec_jax.load.open_checkpoint", open_tiny)
  flags = ["--gin.TARGET=%XL", "--gin.INPUT='gone.txt'"]
  flags += [f"--gin.VOCABULARY={str(tiny_pair.folder() / 'vocabulary.model')!r}"]
  files = ["--gin_file=gin/runs/speedup.gin", f"--gin_file=gin/models/{family}.gin"]
  try:
    assert main(["run", "--jax_compilation_cache_dir=", *files, *flags])
  finally:
    gin.clear_config()
  assert "gone.txt" in capsys.readouterr().err  # it continued to the texts
  bucket = "gs://t5-data/pretrained_models/t5x/"
  assert len(opened) == 2 and opened[0].startswith(bucket + xl)
  assert opened[1].startswith(bucket) and "_small/checkpoint_" in opened[1]


def test_unknown_dtype():
  with pytest.raises(InputError, match="'int8'.*float32"):
    load(dtype="int8")


@pytest.mark.parametrize("most", [0, -5])
def test_limit_below_1_raises(most):
  with pytest.raises(InputError, match=f"max_source_tokens is {most}"):
    load(max_source_tokens=most)


# Texts to prompts.


def test_sources_are_cut_to_the_limit_and_keep_eos():
  text = tiny_pair.SENTENCES[0]
  ids = load().vocabulary.encode(text)
  for most in (2, 5, len(ids) - 1):
    pair = load(max_source_tokens=most)
    assert pair.encode(text) == [*ids[: most - 1], EOS_ID]
    assert pair.cut(text) == pair.vocabulary.decode(ids[: most - 1])
    assert text.startswith(pair.cut(text).strip())
  for most in (len(ids), len(ids) + 1, 128):
    pair = load(max_source_tokens=most)
    assert pair.encode(text) == ids and pair.cut(text) is None


@pytest.mark.slow
def test_truncation_is_a_warning_with_the_number_of_texts():
  """Once per call; the default limit is that of the model, 512 for relative positions."""
  text = tiny_pair.SENTENCES[0]
  pair = load(max_source_tokens=5)
  for call in (
    lambda: pair.generate([text, "A", text], max_new_tokens=2, batch_size=2),
    lambda: pair.generate([text, "A", text], max_new_tokens=2, num_beams=2),
  ):
    with pytest.warns(UserWarning) as caught:
      call()
    (warning,) = caught
    assert str(warning.message).startswith("2 of 3 texts have more than max_source_tokens (5)")
    assert warning.filename == __file__
  assert load().max_source_tokens == 512
  folder = str(tiny_pair.gpt_folder() / "target")
  gpt = load_pair(folder, vocabulary=str(tiny_pair.gpt_folder() / "vocabulary.txt"))
  assert gpt.max_source_tokens == 96


def test_prompts_are_padded_to_multiples_of_8():
  """The longest source determines the width, so that texts of similar lengths share a compiled
  program."""
  pair = tiny_pair.pair(max_source_tokens=128)
  texts = ["", "A man", tiny_pair.SENTENCES[0], " ".join(tiny_pair.SENTENCES[:2])]
  lengths = [len(pair.encode(text)) for text in texts]
  assert lengths[0] == 1 and lengths[1] <= 16 < lengths[2] <= 32 < lengths[3]
  for count in (1, 2, 3, 4):
    prompt = np.asarray(pair.prompt(texts[:count]))
    assert prompt.shape == (count, -(-lengths[count - 1] // 8) * 8) and prompt.dtype == np.int32
    for row, text, length in zip(prompt, texts, lengths, strict=False):
      assert row[:length].tolist() == pair.encode(text) and not row[length:].any()


def test_prompt_of_full_width_is_not_padded():
  long = " ".join(tiny_pair.SENTENCES)
  for most, width in ((31, 32), (32, 32), (33, 40)):
    assert tiny_pair.pair(max_source_tokens=most).prompt([long]).shape == (1, width)


def test_width_can_be_given():
  assert tiny_pair.pair().prompt(["A man", "Two dogs"], width=17).shape == (2, 17)


# Parameters converted for decoding.


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
def test_for_decoding_preserves_logits_and_its_input(tied, gated):
  cfg = tiny.config(
    vocab_size=20,
    padded_vocab_size=24,
    layers=1,
    gated=gated,
    activation="gelu" if gated else "relu",
    tied_logits=tied,
  )
  params = tiny_pair.random_params(cfg, 0)
  before = jax.tree.map(np.array, params)
  fused = for_decoding(cfg, params)

  assert jax.tree.structure(params) == jax.tree.structure(before)
  jax.tree.map(np.testing.assert_array_equal, params, before)
  assert not cfg.layout.fused and cfg.tied_logits == tied

  source, inputs = tiny.sources(cfg, 0, 3), tiny.sources(cfg, 1, 3)
  want = tiny.teacher_forced(cfg)(params, source, inputs)
  got = tiny.teacher_forced(fused[0])(fused[1], source, inputs)
  assert want.shape == (3, 7, 20) and np.std(want) > 1
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)  # sums in another order


def test_for_decoding_is_idempotent():
  cfg = tiny.config(layers=1)
  once = for_decoding(cfg, tiny_pair.random_params(cfg, 0))
  again = for_decoding(*once)
  assert again[0] == once[0] == cfg.with_layout(fused=True)
  assert again[1] is once[1]


def test_another_vocabulary_of_the_same_size_raises(tmp_path):
  """Equal sizes do not suffice, because ids would have different meanings."""
  folder = tiny_pair.folder()
  words = open_vocabulary(str(folder / "vocabulary.model"))
  config, params = load_model(str(folder / "target"))
  paths = {}
  for name, fingerprint in (("same", words.fingerprint()), ("other", "0" * 16)):
    paths[name] = str(tmp_path / name)
    save_model(paths[name], config, params, fingerprint)
  load(draft=paths["same"])
  with pytest.raises(InputError, match="another vocabulary"):
    load(draft=paths["other"])


@pytest.mark.slow
@pytest.mark.parametrize(("version", "dtype"), [("1.1", "bfloat16")])
def test_random_pair_has_the_published_sizes_and_the_given_alpha(version, dtype):
  pair = random_pair("tiny", "tiny", 0.5, version=version, dtype=dtype, kernels="xla")
  config = dataclasses.replace(t5_config("tiny", version), tied_logits=False)
  published = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

  def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))

  assert size(pair.target.params) == size(pair.draft.params) == size(published)
  assert {x.dtype for x in jax.tree.leaves(pair.target.params)} == {jnp.dtype(dtype)}
  sampling, sources = Sampling(temperature=0.0), tiny_pair.SENTENCES[:8]
  keys = jax.random.split(jax.random.key(0), len(sources))
  decoded = speculative_decode(
    *(
      pair.target.model,
      pair.draft.build(sampling, chain(1)),
      pair.target.params,
      pair.draft.params,
    ),
    *(pair.prompt(sources), keys),
    max_new_tokens=64,
    verifier=TokenVerifier(sampling),
  )
  assert (decoded.lengths == 64).all() and (decoded.not_finite < 0).all()
  judged = decoded.rounds.num_accepted[decoded.rounds.num_emitted > 0]
  # About 340 draft_tokens: 4 standard errors.
  assert judged.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(judged.size))
  assert judged.size > 300


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (dict(target="huge"), "'huge'"),
    (dict(version="2.0"), "'2.0'"),
    (dict(alpha=1.5), "alpha is 1.5"),
    (dict(dtype="int8"), "'int8'"),
  ],
)
def test_invalid_random_pair_raises(given, said):
  with pytest.raises(InputError, match=said):
    random_pair(**{"target": "tiny", "draft": "tiny", "alpha": 0.5, **given})
