"""Test Hugging Face folders of each version of transformers, and damaged folders.

`test_checkpoints_huggingface.py` compares logits with PyTorch.
"""

import json
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
import test_checkpoints_gpt2 as gpt2
import tiny
import tiny_pair
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from test_checkpoints_formats import assert_rejected, hf_tensors, params, write_hf
from tokenizers import Tokenizer, models

from specdec_jax.checkpoints import huggingface
from specdec_jax.checkpoints.families import FAMILIES, bart, t5
from specdec_jax.checkpoints.huggingface import open_state
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import SETTINGS, GenerationConfig
from specdec_jax.core.sampling import Sampling
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError
from specdec_jax.exactness.checker import processors_of
from specdec_jax.generate import generation_config
from specdec_jax.load import load_pair
from specdec_jax.models.gpt import GPTModel

CONFIG = tiny.config(vocab_size=128, layers=1)


@pytest.fixture
def folder(tmp_path):
  return write_hf(tmp_path / "hf", CONFIG, params(CONFIG))


def change(folder, name="config.json", **fields):
  """Set fields of a JSON file, or remove those whose value is `...`."""
  file = folder / name
  about = json.loads(file.read_text()) | fields if file.is_file() else fields
  file.write_text(json.dumps({k: v for k, v in about.items() if v is not ...}))


# Models named as on the Hub. Those in Hugging Face's cache need no network.


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """Return a function that copies a folder into the cache as a model of the given name."""
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.chdir(tmp_path)

  def put(folder, name):
    inside = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (inside / "refs").mkdir(parents=True)
    (inside / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, inside / "snapshots" / ("0" * 40))

  return put


def test_pair_named_as_on_the_hub(tmp_path, hub):
  vocabulary = str(tiny_pair.folder() / "vocabulary.model")
  config = tiny.config(vocab_size=len(open_vocabulary(vocabulary)), layers=1)
  folder = write_hf(tmp_path / "hf", config, params(config))
  shutil.copy(vocabulary, folder / "spiece.model")
  hub(folder, "google/tiny-t5")
  pair = load_pair(*["google/tiny-t5"] * 3)
  assert (pair.target.name, pair.draft.name) == ("tiny-t5", "tiny-t5")
  assert len(pair.vocabulary) == config.vocab_size
  for name in ("google/other-t5", "google/tiny_t5"):
    assert_rejected(name, name, "was not downloaded from the Hugging Face Hub")
  (tmp_path / "google").mkdir()
  assert_rejected("google/tiny-t5", "There is no model in google/tiny-t5")


# Source of the logits. The cases are those of files that each version of transformers wrote.

FOUR, FIVE = dict(transformers_version="4.57.6"), dict(transformers_version="5.23.0")
FOUR["tie_word_embeddings"], FIVE["tie_word_embeddings"] = ..., True
KINDS = {  # config.json; lm_head.weight: separate, the table or missing; are logits scaled?
  "4, t5 1.0": (dict(FOUR, model_type="t5"), None, True),
  "4, t5 1.0, old": (dict(FOUR, model_type="t5", transformers_version=...), "table", True),
  "4, t5 1.0, own": (dict(FOUR, model_type="t5"), "own", True),
  "4, t5 1.1": (dict(FOUR, model_type="t5", tie_word_embeddings=False), "own", False),
  "4, mt5": (dict(FOUR, model_type="mt5", tie_word_embeddings=False), "own", False),
  "4, mt5, tied": (dict(FOUR, model_type="mt5", tie_word_embeddings=True), None, True),
  "5, t5 1.0": (dict(FIVE, model_type="t5", scale_decoder_outputs=True), None, True),
  "5, t5 1.0, own": (dict(FIVE, model_type="t5", scale_decoder_outputs=True), "own", True),
  "5, t5 1.1": (dict(FIVE, model_type="t5", scale_decoder_outputs=False), "own", False),
  "5, t5 1.1, tied": (dict(FIVE, model_type="t5", scale_decoder_outputs=False), None, False),
  "5, mt5": (dict(FIVE, model_type="mt5"), "own", False),
  "5, mt5, tied": (dict(FIVE, model_type="mt5"), None, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_files_of_each_version(folder, kind):
  fields, head, scaled = KINDS[kind]
  change(folder, **fields)
  tensors = hf_tensors(CONFIG, params(CONFIG))
  table, own = tensors["shared.weight"], tensors.pop("lm_head.weight")
  if head:
    tensors["lm_head.weight"] = own if head == "own" else table.copy()
  save_file(tensors, folder / "model.safetensors")

  tree = params(CONFIG)
  matrix = (own if head == "own" else table).T / (CONFIG.emb_dim**0.5 if scaled else 1)
  tree = {**tree, "decoder": {**tree["decoder"], "logits_dense": {"kernel": matrix}}}
  given = tiny.sources(CONFIG, 0, 2), tiny.sources(CONFIG, 1, 2)
  want = tiny.teacher_forced(CONFIG)(tree, *given)

  config = open_checkpoint(str(folder)).config
  assert config.tied_logits == (scaled and head != "own")
  got = tiny.teacher_forced(config)(open_checkpoint(str(folder)).load(config), *given)
  np.testing.assert_allclose(got, want, atol=1e-5 * float(np.std(want)), rtol=1e-5)


def test_missing_matrix_of_logits_is_reported(folder):
  """The logits are untied, and this transformers version does not compute them with the table."""
  tensors = hf_tensors(CONFIG, params(CONFIG))
  del tensors["lm_head.weight"]
  save_file(tensors, folder / "model.safetensors")
  assert_rejected(folder, "decoder/logits_dense/kernel (found nothing", config=CONFIG)


def test_names_of_the_embedding_table_must_agree(folder):
  tensors = hf_tensors(CONFIG, params(CONFIG))
  tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
  save_file(tensors, folder / "model.safetensors")
  open_checkpoint(str(folder)).load(CONFIG)
  tensors["decoder.embed_tokens.weight"][-1, -1] += 1
  save_file(tensors, folder / "model.safetensors")
  assert_rejected(folder, "shared.weight", "differs from another array", "token_embedder/embedding")


def test_gpt2_with_untied_logits_whose_config_says_tied(tmp_path):
  arrays = gpt2.tensors(gpt2.params(gpt2.CONFIG))
  arrays["lm_head.weight"] = 2 * arrays["wte.weight"]
  path = gpt2.write(tmp_path / "gpt2", arrays, tie_word_embeddings=True)
  checkpoint = open_checkpoint(path)
  assert not checkpoint.config.tied_logits
  got = checkpoint.load(checkpoint.config)["decoder"]["logits_dense"]["kernel"]
  np.testing.assert_array_equal(got, 2 * arrays["wte.weight"].T)


# Logits that transformers 5.24 computes for files with random weights.

SOURCE, INPUTS = np.array([[5, 9, 40, 3, 0], [7, 0, 1, 1, 1]]), np.array([[0, 4, 8], [0, 60, 2]])
TIED_UMT5 = [[[1.4678, 1.0987], [1.4022, 1.2245], [-1.3973, -1.2907]]]
TIED_UMT5 += [[[1.4075, 0.1116], [-1.9873, -0.6201], [1.0902, 0.4154]]]
TWO_TABLES = [[[7.0497, 19.0094], [7.0466, 19.0764], [7.0432, 18.8697]]]
TWO_TABLES += [[[7.2750, 16.5350], [7.2745, 16.5346], [7.2744, 16.5347]]]


def write_random(folder, fields, shapes):
  """Write a folder of transformers; the weights depend on the order of their names."""
  rng = np.random.default_rng(0)
  arrays = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in sorted(shapes)}
  change(folder, **fields)
  save_file(arrays, folder / "model.safetensors")


def assert_logits(folder, source, inputs, want):
  checkpoint = open_checkpoint(str(folder))
  params = checkpoint.load(checkpoint.config)
  got = tiny.teacher_forced(checkpoint.config)(params, source, inputs)
  np.testing.assert_allclose(got[:, :, :2], want, atol=2e-4)


def test_tied_umt5_without_the_field(tmp_path):
  """The default of `tie_word_embeddings` is true for umT5, and false for mT5."""
  fields = {"model_type": "umt5", **model_files.T5}
  shapes = model_files.t5_shapes("umt5", {**fields, "tie_word_embeddings": True})
  del fields["tie_word_embeddings"]
  write_random(tmp_path, fields, shapes)
  assert_logits(tmp_path, SOURCE, INPUTS, TIED_UMT5)


def test_marian_with_two_tables_own_logits_and_own_positions(tmp_path):
  fields = {"model_type": "marian", **model_files.BART, **model_files.MARIAN}
  fields |= dict(activation_function="relu", decoder_start_token_id=95, decoder_vocab_size=96)
  fields |= dict(share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
  shapes = model_files.bart_shapes("marian", fields)
  table = shapes.pop("model.shared.weight")
  shapes["lm_head.weight"] = table
  for stack in ("encoder", "decoder"):
    shapes[f"model.{stack}.embed_tokens.weight"] = table
    shapes[f"model.{stack}.embed_positions.weight"] = fields["max_position_embeddings"], table[1]
  write_random(tmp_path, fields, shapes)
  source = np.where(SOURCE == 1, 95, SOURCE)
  inputs = np.where(np.arange(3) == 0, 95, INPUTS)
  assert_logits(tmp_path, source, inputs, TWO_TABLES)
  change(tmp_path, share_encoder_decoder_embeddings=True)
  assert_rejected(tmp_path, "differs from another array", "according to its config")


# Outputs that end at the last of 24 positions.

POSITIONS = 24
SMALL = dict(model_files.BART, max_position_embeddings=POSITIONS, decoder_start_token_id=2)
SMALL["forced_eos_token_id"] = None  # or EOS would be the last token
OF_KIND = {
  "bart": dict(SMALL, pad_token_id=1, eos_token_id=2),
  "marian": dict(SMALL, **model_files.MARIAN, scale_embedding=True)
  | {"decoder_start_token_id": 95},
  "gpt2": dict(vocab_size=96, n_positions=POSITIONS, n_embd=32, n_head=4, n_layer=2)
  | dict(bos_token_id=95, eos_token_id=95),
}
END_SETTINGS = {
  "greedy": dict(no_repeat_ngram_size=2),
  "beams": dict(no_repeat_ngram_size=2, num_beams=4, length_penalty=0.8),
}
LENGTHS = 3, 22  # tokens of the sources, without EOS
# Tokens by transformers 5.24.
ENDS = {
  "bart, greedy": "54 54 5 54 72 54 25 54 6 54 51 54 68 54 88 54 32 54 29 54 41 54 0 54 / "
  "54 54 5 54 72 54 25 54 6 54 32 54 41 54 51 54 88 54 0 54 68 54 29 54",
  "bart, beams": "54 54 5 5 54 72 54 25 54 6 5 25 5 72 5 6 54 68 54 51 54 88 54 32 / "
  "54 5 54 54 72 54 25 54 6 54 32 54 41 54 51 54 88 54 0 54 68 54 29 54",
  "marian, greedy": "82 82 46 82 22 82 58 82 76 82 16 82 23 82 87 82 29 82 33 82 72 82 21 82 / "
  "82 82 87 82 22 82 76 82 58 82 29 82 21 82 23 82 46 82 34 82 32 82 72 82",
  "marian, beams": "82 22 82 82 46 82 58 82 76 82 16 82 23 82 87 82 29 82 33 82 72 82 21 82 / "
  "82 76 82 82 87 82 22 82 58 82 21 82 29 82 23 82 32 82 46 82 34 82 27 82",
  "gpt2, greedy": "18 18 21 21 18 13 13 18 79 18 24 18 52 21 13 21 79 13 20 18 20 20 / 18 18 21",
  "gpt2, beams": "18 21 21 79 79 18 65 21 18 18 13 13 18 49 13 21 13 20 18 79 13 79 / 13 18 18",
}


class Ids(Vocabulary):
  """Vocabulary of 96 tokens, whose texts are token ids."""

  path = "ids"

  def __init__(self, fields):
    self.eos_id, self.pad_id = fields["eos_token_id"], fields.get("pad_token_id", 0)
    self.start_id = fields.get("decoder_start_token_id", self.eos_id)

  def __len__(self):
    return 96

  def encode(self, text):
    return [*map(int, text.split()), self.eos_id]

  def decode(self, ids):
    return " ".join(map(str, ids))

  def pieces(self, ids):
    return [*map(str, ids)]

  def all_pieces(self):
    return self.pieces(range(96))


def of_kind(kind):
  """Return the fields and the arrays of a model with random weights, and its sources."""
  fields, rng = {"model_type": kind, **OF_KIND[kind]}, np.random.default_rng(3)
  shapes = {} if kind == "gpt2" else model_files.bart_shapes(kind, fields)
  if kind == "gpt2":
    config = open_checkpoint((fields, {})).config
    shapes = {name: x.shape for name, x in gpt2.tensors(gpt2.params(config)).items()}
  state = {}
  for name in sorted(shapes):
    norm = name.endswith("norm.weight") or ".ln_" in name or name.startswith("ln_")
    spread = 0.3 if len(shapes[name]) == 1 else 0.6 if "e.weight" in name else 1.5 * 32**-0.5
    state[name] = (rng.normal(0, spread, shapes[name]) + norm).astype(np.float32)
  sources = [" ".join(map(str, rng.integers(3, 90, length))) for length in LENGTHS]
  return fields, state, sources


def ends_by_transformers(kind, settings):
  """Return the tokens that transformers generates up to the last position."""
  torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
  fields, state, sources = of_kind(kind)
  names = {"bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}
  of = getattr(transformers, names.get(kind, "GPT2LMHeadModel"))
  config = of.config_class(**{k: v for k, v in fields.items() if k != "model_type"})
  model = of(config).eval()
  prefix = "transformer." if kind == "gpt2" else ""
  given = {prefix + name: torch.tensor(array) for name, array in state.items()}
  assert not model.load_state_dict(given, strict=False).unexpected_keys
  model.tie_weights()
  found = []
  for source in sources:
    ids = [*map(int, source.split())] + [fields["eos_token_id"]] * (kind != "gpt2")
    limit = POSITIONS + 1 - len(ids) if kind == "gpt2" else POSITIONS
    names = "pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"
    tokens = {name: fields.get(name) for name in names}
    model.generation_config = transformers.GenerationConfig(
      do_sample=False, max_new_tokens=limit, min_new_tokens=limit, **tokens, **settings
    )
    (row,) = model.generate(torch.tensor([ids])).tolist()
    found.append(row[len(ids) if kind == "gpt2" else 1 :])
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENDS])
def test_recorded_ends_are_those_of_transformers(name):
  want = [[*map(int, row.split())] for row in ENDS[name].split("/")]
  kind, settings = name.split(", ")
  assert ends_by_transformers(kind, END_SETTINGS[settings]) == want


@pytest.mark.parametrize("name", ["bart, beams", "marian, greedy", "gpt2, greedy"])
@pytest.mark.slow
def test_outputs_that_end_at_the_last_position(name):
  """A round drafts past the last position. The limit is the default one, or is given."""
  kind, settings = name.split(", ")
  fields, state, sources = of_kind(kind)
  pair = load_pair((fields, state), vocabulary=Ids(fields))
  for source, length, want in zip(sources, LENGTHS, ENDS[name].split("/"), strict=True):
    limit = POSITIONS + 1 - length if kind == "gpt2" else POSITIONS
    how = dict(END_SETTINGS[settings], min_new_tokens=limit)
    for given in ({}, dict(gamma=0, max_new_tokens=limit)):
      (output,) = pair.generate([source], **how, **given)
      assert output.tokens.tolist() == [*map(int, want.split())]
    with pytest.raises(InputError, match=f"has {POSITIONS} positions; .* at most {limit}"):
      pair.generate([source], **how, max_new_tokens=limit + 1)


@pytest.mark.parametrize("kind", ["marian", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_sources_of_similar_lengths_share_a_program(kind):
  """Sources are padded to 16 or to 24 tokens, and a longer source is truncated to 24."""
  fields, state, _ = of_kind(kind)
  pair = load_pair((fields, state), vocabulary=Ids(fields), max_source_tokens=1000)
  num_programs = []
  for length in (15, 9, 16, 24, 17):
    pair.generate([" ".join(["7"] * (length - 1))], gamma=0, max_new_tokens=1)
    num_programs.append(Decoder.run._cache_size())
  assert np.diff(num_programs).tolist() == [0, 0, 1, 0]
  with pytest.warns(UserWarning, match="1 of 1 texts have more than max_source_tokens .24. tokens"):
    (output,) = pair.generate(["7 " * 40], gamma=0, max_new_tokens=1)
  assert Decoder.run._cache_size() == num_programs[-1] and len(output.tokens) == 1


@pytest.mark.slow
def test_settings_of_opus_mt_are_accepted():
  """OPUS-MT has 512 positions, and `max_length` 512 with 4 beams in its files."""
  fields, state, (source, _) = of_kind("marian")
  fields |= dict(max_position_embeddings=512, max_length=512, num_beams=4)
  pair = load_pair((fields, state), vocabulary=Ids(fields))
  (output,) = pair.generate([source])
  assert output.score is not None and len(output.tokens) < 512


# Token ids and generation settings.


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("dense_act_fn", "silu", "'gelu_new'"),
    ("is_gated_act", False, "True"),
    ("tie_word_embeddings", "no", "True or False"),
    ("scale_decoder_outputs", None, "True or False"),
  ],
)
def test_unsupported_settings_of_t5_are_rejected(folder, field, value, said):
  change(folder, **{field: value})
  assert_rejected(folder, field, "config.json", said, config=CONFIG)


def test_generation_config_overrides_the_config(folder):
  change(folder, decoder_start_token_id=5, eos_token_id=7)
  said = dict(decoder_start_token_id=0, eos_token_id=[9], pad_token_id=None)
  change(folder, "generation_config.json", **said)
  assert open_checkpoint(str(folder)).eos_ids == (9,)


NEUTRAL = dict(num_beams=1, no_repeat_ngram_size=0, repetition_penalty=1.0, min_length=0)
NEUTRAL |= dict(begin_suppress_tokens=[], forced_bos_token_id=None, length_penalty=0.6, top_k=10)
NEUTRAL |= dict(do_sample=False, max_length=20, temperature=0.5)


@pytest.fixture
def t5_and_words(tmp_path):
  words = open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))
  config = tiny.config(vocab_size=len(words), layers=1)
  return write_hf(tmp_path / "hf", config, tiny_pair.random_params(config, 0)), words


@pytest.mark.parametrize(
  ("stated", "named"),
  [
    (NEUTRAL, None),
    (
      dict(repetition_penalty=1.5, no_repeat_ngram_size=2, num_beams=4, length_penalty=2.0),
      "repetition_penalty 1.5, no_repeat_ngram_size 2, num_beams 4, length_penalty 2.0",
    ),
    (
      dict(bad_words_ids=[[3]], forced_bos_token_id=0, forced_eos_token_id=1),
      "bad_words_ids [[3]], forced_bos_token_id 0",
    ),
    (dict(do_sample=True, top_k=10), "do_sample True, top_k 10"),
    (
      dict(min_new_tokens=3, encoder_no_repeat_ngram_size=2),
      "min_new_tokens 3, encoder_no_repeat_ngram_size 2, which",
    ),
  ],
)
def test_commands_name_the_generation_settings_that_they_do_not_apply(t5_and_words, stated, named):
  folder, words = t5_and_words
  change(folder, task_specific_params={"summarization": {"num_beams": 4}})
  for file in ("config.json", "generation_config.json"):  # the second overrides the first
    change(folder, file, **stated)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      pair = load_pair(str(folder), str(folder), words.path)
      assert not caught
      processors_of(pair, GenerationConfig())
    said = [str(warning.message) for warning in caught]
    assert len(said) == (named is not None)
    if named:
      assert said[0].startswith(f"{folder} sets {named}")


# Settings of the file, of a task and of the call, and the texts of transformers 5.24.
BIAS = dict(sequence_bias=[[[1], 2.5]])  # EOS is likely
OPUS = dict(num_beams=4, bad_words_ids=[[0]], no_repeat_ngram_size=2, forced_eos_token_id=1)
RENORMALIZED = [32, 41, 19, 4, 19, 20, 20, 25, 32, 11, 4, 1]
OPUS_TEXTS = [
  [32, 41, 19, 44, 13, 6, 20, 4, 7, 35, 38, 1],
  [32, 41, 19, 44, 13, 6, 19, 4, 7, 35, 37, 1],
]
MERGED = {
  "as OPUS-MT": (
    OPUS | dict(renormalize_logits=True),
    {},
    dict(max_new_tokens=12),
    [RENORMALIZED, [32, 41, 19, 44, 13, 6, 19, 4, 24, 19, 68, 1]],
  ),
  "renormalize_logits of the call": (
    OPUS | dict(renormalize_logits=True),
    {},
    dict(max_new_tokens=12, renormalize_logits=False),
    OPUS_TEXTS,
  ),
  "negative length_penalty": (
    BIAS,
    {},
    dict(num_beams=4, length_penalty=-2.0),
    [[32, 41, 1], [55, 1]],
  ),
  "length_penalty of the file, beams of the call": (
    BIAS | dict(length_penalty=3.0),
    {},
    dict(num_beams=4),
    [[32, 41, 19, 44, 13, 6, 20, 4, 24, 19], [32, 41, 19, 44, 13, 4, 19, 44, 13, 4]],
  ),
  "neutral values of a task": (
    BIAS | dict(num_beams=4, min_length=9, no_repeat_ngram_size=2, length_penalty=3.0),
    dict(num_beams=1, min_length=0, no_repeat_ngram_size=0),
    {},
    [[32, 41, 2, 1], [32, 41, 19, 44, 1]],
  ),
  "beams of a task": (
    BIAS | dict(num_beams=1, length_penalty=3.0, forced_bos_token_id=5),
    dict(num_beams=4, length_penalty=0.0, forced_eos_token_id=1),
    dict(min_length=4),
    [[5, 32, 41, 2, 1], [5, 31, 48, 1]],
  ),
  "begin_suppress_tokens": (
    BIAS | dict(begin_suppress_tokens=[32, 55, 31]),
    {},
    dict(num_beams=4),
    [[46, 7, 37, 32, 41, 19, 44, 13, 4, 32], [19, 4, 19, 44, 13, 4, 19, 44, 1]],
  ),
  "begin_suppress_tokens after a forced token": (
    BIAS | dict(forced_bos_token_id=32, begin_suppress_tokens=[32, 41]),
    {},
    {},
    [[32, 24, 24, 19, 44, 13, 6, 39, 36, 32], [32, 24, 19, 44, 1]],
  ),
  "begin_suppress_tokens after forced tokens": (
    BIAS | dict(forced_bos_token_id=5, begin_suppress_tokens=[41]),
    {},
    dict(decoder_input_ids=[[0, 32], [0, 32]]),
    [[24, 24, 19, 44, 13, 6, 39, 36, 32, 30], [24, 19, 44, 1]],
  ),
}


@pytest.fixture
def merged_case(t5_and_words, request):
  """Return a folder with the settings of a case, the vocabulary, the call, and the texts."""
  folder, words = t5_and_words
  file, task, call, want = MERGED[request.param]
  ids = dict(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
  change(folder, task_specific_params={"task": task}, **ids)
  change(folder, "generation_config.json", **file, **ids)
  return folder, words, task, {"max_new_tokens": 10, **call}, want


BEGINNINGS = tiny_pair.SENTENCES[0], tiny_pair.SENTENCES[100]


@pytest.mark.slow
@pytest.mark.parametrize("merged_case", MERGED, indirect=True)
def test_settings_are_merged_as_in_transformers(merged_case):
  folder, words, task, call, want = merged_case
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    pair = load_pair(str(folder), vocabulary=words.path)
    outputs = pair.generate(BEGINNINGS, task="task" if task else None, batch_size=2, **call)
  assert [output.tokens.tolist() for output in outputs] == want


@pytest.mark.slow
@pytest.mark.parametrize("merged_case", MERGED, indirect=True)
def test_texts_of_merged_settings_are_those_of_transformers(merged_case):
  torch = pytest.importorskip("torch")
  from transformers import T5ForConditionalGeneration

  folder, words, task, call, want = merged_case
  model = T5ForConditionalGeneration.from_pretrained(folder)
  prefixes = call.pop("decoder_input_ids", [[0], [0]])
  for text, prefix, tokens in zip(BEGINNINGS, prefixes, want, strict=True):
    inputs = dict(input_ids=[words.encode(text)], decoder_input_ids=[prefix])
    inputs = {name: torch.tensor(x) for name, x in inputs.items()}
    row = model.generate(**inputs, **{**task, **call})[0, len(prefix) :].tolist()
    assert row == tokens


def test_temperature_and_task_of_a_file_do_not_turn_on_sampling(t5_and_words):
  """A call that samples does so with the settings of the file, of a folder or in memory."""
  folder, words = t5_and_words
  change(folder, task_specific_params={"cold": {"temperature": 0.2}, "all": {"top_k": 0}})
  change(folder, "generation_config.json", temperature=0.7, top_k=10, bos_token_id=1)
  fields = json.loads((folder / "config.json").read_text())
  in_memory = types.SimpleNamespace(
    config=fields,
    state_dict=lambda: load_file(folder / "model.safetensors"),
    generation_config=json.loads((folder / "generation_config.json").read_text()),
  )
  for target in (str(folder), in_memory):
    pair = load_pair(target, vocabulary=words.path)
    for task, call, want in (
      (None, {}, Sampling(0.0)),
      (None, dict(do_sample=True), Sampling(0.7, top_k=10)),
      (None, dict(temperature=0.9), Sampling(0.9, top_k=10)),
      (None, dict(do_sample=True, top_k=0), Sampling(0.7)),
      ("cold", {}, Sampling(0.0)),
      ("cold", dict(do_sample=True), Sampling(0.2, top_k=10)),
      ("all", dict(do_sample=True), Sampling(0.7)),
    ):
      assert generation_config(pair, task, call)[0].sampling() == want


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_files_that_are_no_json_objects_are_refused(t5_and_words, file, content):
  folder, words = t5_and_words
  shutil.copy(words.path, folder / "spiece.model")
  (folder / file).write_text(content)
  with pytest.raises(InputError, match=f"{file} is damaged"):
    load_pair(str(folder))


def test_added_token_that_no_memory_would_hold_is_refused(t5_and_words):
  folder, words = t5_and_words
  shutil.copy(words.path, folder / "spiece.model")
  tokens = {str(2**31 - 1): {"content": "a"}}
  change(folder, "tokenizer_config.json", added_tokens_decoder=tokens)
  with pytest.raises(InputError, match="has a token with the id 2147483647; ids lie below"):
    load_pair(str(folder))


@pytest.mark.slow
def test_token_ids_that_no_memory_would_hold_are_refused(tmp_path):
  tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 2**31 - 1}, unk_token="</s>"))
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  with pytest.raises(InputError, match="has a token with the id 2147483647; ids lie below"):
    open_vocabulary(str(tmp_path / "tokenizer.json"))
  with pytest.raises(InputError, match="has a token with the id 21"):
    open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"), extra_ids=2**31 - 1)


@pytest.mark.parametrize(
  ("settings", "task", "want"),
  [
    (dict(do_sample=True), {}, Sampling(1.0, top_k=50)),
    (dict(do_sample=True, temperature=0.7, top_k=None), {}, Sampling(0.7, top_k=50)),
    (dict(do_sample=True, top_k=0), {}, Sampling(1.0)),
    (dict(do_sample=True, top_k=7), dict(temperature=0.5), Sampling(0.5, top_k=7)),
    ({}, dict(do_sample=True), Sampling(1.0, top_k=50)),
    ({}, dict(do_sample=True, top_k=7), Sampling(1.0, top_k=7)),
    (dict(temperature=0.7), {}, Sampling(0.0)),
  ],
)
def test_files_that_sample_have_the_default_top_k_of_transformers(
  t5_and_words, settings, task, want
):
  folder, words = t5_and_words
  change(folder, task_specific_params={"own": task})
  for file in ("config.json", "generation_config.json"):
    change(folder, file, **settings)
    pair = load_pair(str(folder), vocabulary=words.path)
    assert generation_config(pair, "own", {})[0].sampling() == want
    assert generation_config(pair, "own", dict(top_k=None))[0].sampling().top_k == 0


def test_token_ids_of_a_model_in_memory(folder):
  """As in a folder, those of the generation config take precedence."""
  state = load_file(folder / "model.safetensors")
  fields = json.loads((folder / "config.json").read_text())
  ids = dict(decoder_start_token_id=7, eos_token_id=[9, 1], pad_token_id=None)
  model = types.SimpleNamespace(config=fields, state_dict=lambda: state, generation_config=ids)
  checkpoint = open_checkpoint(model)
  assert (checkpoint.config.start_id, checkpoint.eos_ids) == (7, (9, 1))


@pytest.mark.parametrize(
  ("file", "stated", "named"),
  [
    ("config.json", dict(diversity_penalty=0.5, num_beams=4), "diversity_penalty 0.5"),
    ("config.json", dict(diversity_penalty=0.5, num_beam_groups=1, penalty_alpha=0.0), None),
    ("generation_config.json", dict(top_h=0.5, do_sample=True), "top_h 0.5"),
    (
      "generation_config.json",
      dict(new_of_2027=[3], max_time=2.0),
      "new_of_2027 [3], max_time 2.0",
    ),
    (
      "generation_config.json",
      dict(
        _from_model_config=True,
        transformers_version="5.24.0",
        use_cache=False,
        cache_implementation="static",
        output_scores=True,
        return_dict_in_generate=True,
        num_assistant_tokens=5,
        bos_token_id=3,
        guidance_scale=1.0,
        top_h=0.5,
      ),
      None,
    ),
    (
      "config.json",
      dict(task_specific_params={"a": dict(prefix="p", num_beams=2, diversity_penalty=0.5)}),
      "diversity_penalty 0.5",
    ),
  ],
)
def test_settings_of_a_file_that_are_not_supported_are_named(t5_and_words, file, stated, named):
  folder, words = t5_and_words
  change(folder, file, **stated)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pair = load_pair(str(folder), vocabulary=words.path)
    pair.generate([], task="a" if "task_specific_params" in stated else None)
  assert len(caught) == (named is not None)
  if named:
    assert str(caught[0].message).startswith(f"{folder} sets {named}. transformers applies")


@pytest.mark.parametrize(
  ("kind", "fields"),
  [
    ("Bart", dict(force_bos_token_to_be_generated=True)),
    ("Bart", dict(force_bos_token_to_be_generated=True, bos_token_id=5, num_beams=4)),
    ("Bart", dict(force_bos_token_to_be_generated=False, forced_bos_token_id=6)),
    ("Bart", dict(forced_eos_token_id=None, begin_suppress_tokens=[5])),
    ("MBart", {}),
    ("Pegasus", dict(length_penalty=0.8, num_beams=8)),
    ("Marian", dict(bad_words_ids=[[58100]], max_length=512)),
    ("M2M100", dict(early_stopping=True, num_beams=5, max_length=200)),
  ],
)
def test_settings_in_a_config_without_a_generation_config(kind, fields):
  """They are those that transformers reads; in older files, some are defaults or have old names."""
  transformers = pytest.importorskip("transformers")
  name = {"M2M100": "m2m_100"}.get(kind, kind.lower())
  config = {"model_type": name, **fields}
  want = transformers.GenerationConfig.from_model_config(
    {**getattr(transformers, f"{kind}Config")().to_dict(), **fields}
  )
  found = huggingface.generation_of(config, None).settings
  assert found == {
    x: y
    for x, y in want.to_dict().items()
    if y not in (None, []) and x in SETTINGS and x != "eos_token_id"
  }


def test_list_of_eos_ids(t5_and_words):
  """The list must contain the vocabulary's EOS. An id that the model cannot emit is ignored."""
  folder, words = t5_and_words

  def load():
    return load_pair(str(folder), str(folder), words.path)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for eos_ids in ([1], [1, 1], [len(words), 1]):
      change(folder, "generation_config.json", eos_token_id=eos_ids)
      assert load().vocabulary.eos_id == 1
  change(folder, "generation_config.json", eos_token_id=[1, 5])
  assert load().target.generation == {"eos_token_id": [1, 5]}
  change(folder, "generation_config.json", eos_token_id=[5, 7])
  with pytest.raises(InputError, match="ends a text with token 5 or 7 but .* with 1;"):
    load()


def test_eos_is_compared_with_the_vocabulary(tmp_path):
  words = open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))
  config = tiny.config(vocab_size=len(words), layers=1)
  path = write_hf(tmp_path / "hf", config, tiny_pair.random_params(config, 0))
  change(path, eos_token_id=7)
  said = "The target in .* ends a text with token 7 but .*vocabulary.model with 1;"
  with pytest.raises(InputError, match=said):
    load_pair(str(path), str(path), words.path)


# Damaged folders.


def test_damaged_header_is_reported(folder):
  """Each of 60 bytes is damaged in turn, including lengths, types, shapes and offsets of arrays."""
  file = folder / "model.safetensors"
  content = file.read_bytes()
  for at in range(0, 900, 15):
    file.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
    try:
      open_checkpoint(str(folder)).load(CONFIG)
    except InputError as error:
      assert "\n" not in str(error)


def test_models_in_memory_equal_their_checkpoints(t5_and_words):
  """As arrays with the names of transformers, and as parameters of this package."""
  folder, words = t5_and_words
  change(folder, "generation_config.json", no_repeat_ngram_size=2)
  change(folder, task_specific_params={"summarization": {"prefix": "sum: ", "min_length": 3}})
  fields = json.loads((folder / "config.json").read_text())
  fields |= json.loads((folder / "generation_config.json").read_text())
  state = load_file(folder / "model.safetensors")
  stored = open_checkpoint(str(folder))
  params = stored.load(stored.config)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    want = load_pair(str(folder), str(folder), words.path)
    for model in ((fields, state), (stored.config, params)):
      pair = load_pair(model, model, words.path)
      jax.tree.map(np.testing.assert_array_equal, pair.target.params, want.target.params)
      jax.tree.map(np.testing.assert_array_equal, pair.draft.params, want.draft.params)
      assert pair.target.path is None and "in memory" in pair.target.name
      if model[0] is fields:
        assert (pair.target.generation, pair.target.tasks) == (
          want.target.generation,
          want.target.tasks,
        )
  assert want.target.generation == {"no_repeat_ngram_size": 2}
  assert want.target.tasks["summarization"] == {"prefix": "sum: ", "min_length": 3}
  with pytest.raises(InputError, match="give its vocabulary too"):
    load_pair((fields, state))
  with pytest.raises(InputError, match="model_type in the dict in memory/config.json is 'bert'"):
    load_pair(({**fields, "model_type": "bert"}, state), vocabulary=words.path)


# Fields that are absent, null or odd.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*t5.DEFAULTS, "gpt2", *bart.DEFAULTS])
def test_absent_fields_have_the_defaults_of_transformers(kind):
  transformers = pytest.importorskip("transformers", reason="transformers is not installed")
  whole = transformers.AutoConfig.for_model(kind).to_dict()
  module = FAMILIES[kind]
  assert module.config("x", {"model_type": kind}) == module.config("x", whole)


@pytest.mark.parametrize("given", [None, [], ...], ids=str)
def test_t5_without_start_or_eos_has_those_of_t5(folder, given):
  want = open_checkpoint(str(folder))
  change(folder, decoder_start_token_id=None if given == [] else given, eos_token_id=given)
  found = open_checkpoint(str(folder))
  assert (found.config, found.eos_ids) == (want.config, want.eos_ids)


def test_padding_of_generation_config_moves_no_positions():
  fields = {"model_type": "m2m_100", "max_position_embeddings": 8, "d_model": 4}
  want, found = (
    open_state("x", fields, {}, generation) for generation in ({}, {"pad_token_id": 2})
  )
  assert found.config == want.config and found.config.pad_id == 1
  for name in ("encoder/positions", "decoder/positions"):
    np.testing.assert_array_equal(found.arrays[name].array, want.arrays[name].array)


def test_gpt2_whose_eos_is_token_0_pads_with_another():
  config = FAMILIES["gpt2"].config("x", {"model_type": "gpt2", "eos_token_id": 0})
  assert (config.eos_id, config.pad_id) == (0, 1)
  lengths = GPTModel(config).prompt_tokens(jnp.array([[5, 6, 0, 1], [7, 0, 1, 1]]))[1]
  assert lengths.tolist() == [2, 1]


def test_adapter_next_to_a_model_is_an_error(folder):
  change(folder, "adapter_config.json", peft_type="LORA")
  with pytest.raises(InputError, match="has an adapter next to the model .*merge it"):
    open_checkpoint(str(folder))
