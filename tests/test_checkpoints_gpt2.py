"""Test GPT-2 in the format of transformers: parameters, vocabulary, and the logits of PyTorch."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import traverse_util
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec_jax.checkpoints.checkpoint import param_shapes
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.models.families import for_decoding, module_of
from specdec_jax.models.sizes import gpt_config

TEXTS = ["Ein kleines Mädchen spielt.", "日本語 🎉🎉", " two  spaces\n\nand lines \n", ""]


def byte_pairs(size=300):
  """Return a tokenizer like GPT-2's, with `size` pieces and then the token that ends a text."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(tiny_pair.SENTENCES, trainer)
  tokenizer.add_special_tokens(["<|endoftext|>"])
  return tokenizer


CONFIG = gpt_config(
  "small",
  "gpt2",
  vocab_size=301,
  eos_id=300,
  emb_dim=16,
  num_heads=4,
  head_dim=4,  # its square root divides exactly
  mlp_dim=32,
  num_decoder_layers=2,
  num_positions=64,
)


@functools.cache
def params(config, seed=0):
  """Return random parameters; biases and scales are random too, so that swapped ones differ."""
  rng = np.random.default_rng(seed)

  def draw(leaf):
    return rng.normal(0, 0.4, leaf.shape).astype(np.float32)

  return jax.tree.map(draw, param_shapes(config))


def flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


def tensors(tree, scale=2.0):
  """Return the parameters with the names of transformers and unscaled query matrices."""
  names = flat(tree)
  theirs = {
    "wte.weight": names["token_embedder/embedding"],
    "wpe.weight": names["decoder/positions"],
    "ln_f.weight": names["decoder/decoder_norm/scale"],
    "ln_f.bias": names["decoder/decoder_norm/bias"],
  }
  dense = {"attn.c_proj": "self_attention/out", "mlp.c_fc": "mlp/wi", "mlp.c_proj": "mlp/wo"}
  norms = {"ln_1": "pre_self_attention_layer_norm", "ln_2": "pre_mlp_layer_norm"}
  for layer in range(sum(name.endswith("mlp/wo/bias") for name in names)):
    at = f"decoder/layers_{layer}"
    for ours, kind in (("kernel", "weight"), ("bias", "bias")):
      query, key, value = (names[f"{at}/self_attention/{x}/{ours}"] for x in QKV)
      joint = np.concatenate([(scale * query).astype(query.dtype), key, value], axis=-1)
      theirs[f"h.{layer}.attn.c_attn.{kind}"] = joint
      for part, name in dense.items():
        theirs[f"h.{layer}.{part}.{kind}"] = names[f"{at}/{name}/{ours}"]
    for part, name in norms.items():
      theirs[f"h.{layer}.{part}.weight"] = names[f"{at}/{name}/scale"]
      theirs[f"h.{layer}.{part}.bias"] = names[f"{at}/{name}/bias"]
  return theirs


QKV = ("query", "key", "value")
ABOUT = {
  "model_type": "gpt2",
  "vocab_size": 301,
  "n_positions": 64,
  "n_embd": 16,
  "n_head": 4,
  "n_layer": 2,
  "n_inner": 32,
  "eos_token_id": 300,
}


def write(folder, arrays, num_files=1, **about):
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps({**ABOUT, **about}))
  if num_files == 1:
    save_file(arrays, folder / "model.safetensors")
    return str(folder)
  where = {n: f"model-{i % num_files + 1:05}-of.safetensors" for i, n in enumerate(arrays)}
  for file in set(where.values()):
    save_file({n: x for n, x in arrays.items() if where[n] == file}, folder / file)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
  return str(folder)


def assert_same(got, want):
  """Assert that two trees have the same names, dtypes and bits."""
  got, want = flat(got), flat(want)
  assert got.keys() == want.keys()
  for name in want:
    assert got[name].dtype == want[name].dtype, name
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]), name)


# Parameters.


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_config_and_parameters_are_read(tmp_path, prefix, num_files):
  tree = params(CONFIG)
  arrays = {prefix + name: array for name, array in tensors(tree).items()}
  for layer in range(2):  # old files contain these unused arrays
    arrays[f"{prefix}h.{layer}.attn.bias"] = np.tri(64, dtype=bool)[None, None]
    arrays[f"{prefix}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
  if prefix:
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"].copy()
  path = write(tmp_path, arrays, num_files)
  assert open_checkpoint(path).config == CONFIG
  assert_same(open_checkpoint(path).load(CONFIG), tree)
  fused, laid_out = for_decoding(CONFIG, jax.tree.map(jnp.asarray, tree))
  assert_same(open_checkpoint(path).load(fused), laid_out)
  assert_same(
    open_checkpoint(path).load(fused.with_layout(kernels="skinny")), tiny.packed(laid_out)
  )


@pytest.mark.parametrize("head_dim", [4, 2], ids=["an exact root", "no exact root"])
def test_stored_bfloat16_weights_stay_in_bfloat16_for_the_kernels(tmp_path, head_dim):
  config = dataclasses.replace(CONFIG, head_dim=head_dim, num_heads=16 // head_dim)
  tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(config))
  path = write(tmp_path, tensors(tree), n_head=config.num_heads)
  config = dataclasses.replace(config.with_layout(fused=True, kernels="skinny"), tied_logits=False)
  checkpoint = open_checkpoint(path)
  halved = flat(checkpoint.load(config.with_layout(weights="stored")))
  widened = flat(checkpoint.load(config))
  for name, array in halved.items():
    is_rounded = "query_key_value" in name and head_dim == 2
    stays = name.endswith("kernel") and not is_rounded
    assert array.dtype == (jnp.bfloat16 if stays else jnp.float32), name
    np.testing.assert_array_equal(array.astype(jnp.float32), widened[name], name)


def test_parameters_have_the_given_shardings(tmp_path):
  path = write(tmp_path, tensors(params(CONFIG)))
  mesh = jax.make_mesh((1,), ("model",))

  def sharding(leaf):
    spec = jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), "model")
    return jax.sharding.NamedSharding(mesh, spec)

  def place(shapes):
    return jax.tree.map(sharding, shapes)

  got = open_checkpoint(path).load(CONFIG, shardings=place)
  assert_same(got, params(CONFIG))
  assert jax.tree.map(lambda x: x.sharding, got) == place(params(CONFIG))
  arrays = open_checkpoint(path).arrays
  for part in QKV:
    array = arrays[f"decoder/layers_1/self_attention/{part}/kernel"]
    for index in ((slice(3, 7), slice(None)), (slice(None), slice(8, 16)), (slice(1),) * 2):
      np.testing.assert_array_equal(array.read(index), array.read()[index])


PUBLISHED = {
  "distil": dict(n_embd=768, n_head=12, n_layer=6),
  "small": dict(n_embd=768, n_head=12, n_layer=12),
  "medium": dict(n_embd=1024, n_head=16, n_layer=24),
  "large": dict(n_embd=1280, n_head=20, n_layer=36),
  "xl": dict(n_embd=1600, n_head=25, n_layer=48, output_past=True),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_shapes_of_published_models(tmp_path, size):
  about = dict(
    PUBLISHED[size],
    activation_function="gelu_new",
    architectures=["GPT2LMHeadModel"],
    bos_token_id=50256,
    eos_token_id=50256,
    layer_norm_epsilon=1e-05,
    n_ctx=1024,
    n_inner=None,
    n_positions=1024,
    vocab_size=50257,
  )
  assert open_checkpoint(write(tmp_path, {}, **about)).config == gpt_config(size, "gpt2")


@pytest.mark.parametrize(
  ("about", "scales"),
  [
    (dict(scale_attn_weights=False), (1, 1)),
    (dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True), (2, 4)),
  ],
)
def test_other_scales_of_attention_logits(tmp_path, about, scales):
  arrays = tensors(params(CONFIG), scale=1.0)
  got = open_checkpoint(write(tmp_path, arrays, **about)).load(CONFIG)
  for layer, scale in enumerate(scales):
    for kind in ("kernel", "bias"):
      query = got["decoder"][f"layers_{layer}"]["self_attention"]["query"][kind]
      want = params(CONFIG)["decoder"][f"layers_{layer}"]["self_attention"]["query"][kind]
      np.testing.assert_array_equal(query, want / scale)


def test_untied_logits(tmp_path):
  config = dataclasses.replace(CONFIG, tied_logits=False, activation="relu")
  tree = params(config)
  head = np.ascontiguousarray(tree["decoder"]["logits_dense"]["kernel"].T)
  arrays = {**tensors(tree), "lm_head.weight": head}
  about = dict(tie_word_embeddings=False, activation_function="relu")
  path = write(tmp_path, arrays, **about)
  assert open_checkpoint(path).config == config
  assert_same(open_checkpoint(path).load(config), tree)


# Errors.


def assert_rejected(load, *words):
  with pytest.raises(InputError) as caught:
    load()
  for word in words:
    assert word in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("model_type", "gpt_neo", "'gpt2'"),
    ("model_type", None, "'gpt2'"),
    ("activation_function", "gelu", "'gelu_new'"),
    ("activation_function", None, "'gelu_new'"),
    ("layer_norm_epsilon", 1e-6, "1e-05"),
    ("add_cross_attention", True, "False"),
    ("tie_word_embeddings", None, "True or False"),
  ],
)
def test_unsupported_settings_are_rejected(tmp_path, field, value, said):
  path = write(tmp_path, tensors(params(CONFIG)), **{field: value})
  assert_rejected(lambda: open_checkpoint(path), field, "config.json", said)


def test_arrays_of_other_shapes_are_named(tmp_path):
  arrays = tensors(params(CONFIG))
  cut = arrays["h.1.attn.c_attn.weight"][:, :-1].copy()
  path = write(tmp_path, {**arrays, "h.1.attn.c_attn.weight": cut, "score.weight": cut[0]})
  joint = "decoder/layers_1/self_attention/query_key_value/kernel (found (16, 47), expected nothing"
  assert_rejected(
    lambda: open_checkpoint(path).load(CONFIG),
    joint,
    "score.weight (found (47,), expected nothing)",
  )
  path = write(tmp_path, {k: x for k, x in arrays.items() if k != "wpe.weight"})
  missing = "decoder/positions (found nothing, expected (64, 16))"
  assert_rejected(lambda: open_checkpoint(path).load(CONFIG), "1 arrays differ", missing)
  half = (tmp_path / "model.safetensors").read_bytes()[:2000]
  (tmp_path / "model.safetensors").write_bytes(half)
  assert_rejected(lambda: open_checkpoint(path).load(CONFIG), "model.safetensors is damaged")
  (tmp_path / "model.safetensors").unlink()
  assert_rejected(lambda: open_checkpoint(path).load(CONFIG), "pickled", "save_pretrained")


# Vocabulary.


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = tmp_path_factory.mktemp("byte_pairs") / "tokenizer.json"
  byte_pairs().save(str(path))
  return open_vocabulary(str(path))


@pytest.mark.parametrize("text", TEXTS)
def test_encoded_text_decodes_to_itself(vocabulary, text):
  ids = vocabulary.encode(text)
  assert ids[-1] == vocabulary.eos_id == vocabulary.start_id == 300 and len(vocabulary) == 301
  assert max(ids[:-1], default=0) < 300
  assert vocabulary.decode(ids) == vocabulary.decode([*ids, 5, 6]) == text
  assert vocabulary.decode([999, *ids]) == text


def test_pieces_are_those_inside_a_text(vocabulary):
  pieces = vocabulary.pieces(vocabulary.encode("is looking at\nÜ."))
  assert "".join(pieces[:-4]) == "is looking at↵" and " big" in vocabulary.pieces(range(300))
  assert pieces[-4:] == ["\ufffd", "\ufffd", ".", "<|endoftext|>"]  # two bytes of one character
  assert vocabulary.pieces([999]) == ["<999>"]


def test_truncation_and_padding_of_the_file_are_ignored(vocabulary, tmp_path):
  tokenizer = byte_pairs()
  tokenizer.enable_truncation(3)
  tokenizer.enable_padding(length=8)
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  words = open_vocabulary(str(tmp_path / "tokenizer.json"))
  for text in ("A", TEXTS[0]):
    assert words.encode(text) == vocabulary.encode(text)


def test_fingerprint_depends_on_all_pieces(vocabulary, tmp_path):
  same, more, fewer = byte_pairs(), byte_pairs(), byte_pairs(299)
  more.add_tokens(["<|pad|>"])
  prints = []
  for tokenizer in (same, more, fewer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prints.append(open_vocabulary(str(tmp_path / "tokenizer.json")).fingerprint())
  assert prints[0] == vocabulary.fingerprint() and len(set(prints)) == 3


def test_vocabulary_with_gaps_between_ids(tmp_path):
  pieces = {"a": 0, "b": 5, "</s>": 7}
  Tokenizer(models.BPE(pieces, [])).save(str(tmp_path / "tokenizer.json"))
  words = open_vocabulary(str(tmp_path / "tokenizer.json"))
  assert len(words) == 8 and words.all_pieces()[5:] == ["b", "", "</s>"]
  assert words.pieces(words.encode("ab")) == ["a", "b", "</s>"]


# A pair of models.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Return the folders of a target and of a draft whose tokens are often accepted."""
  root, tree = tmp_path_factory.mktemp("gpt2"), params(CONFIG)
  rng = np.random.default_rng(1)
  near = jax.tree.map(lambda x: x + rng.normal(0, 0.02, x.shape).astype(np.float32), tree)
  return write(root / "target", tensors(tree)), write(root / "draft", tensors(near))


@pytest.mark.slow
def test_pair_emits_the_tokens_of_its_target(folders, vocabulary):
  pair = load_pair(*folders, vocabulary.path)
  assert (pair.target.name, pair.draft.name) == ("target", "draft") and pair.continues
  texts = ["A man runs through", "", "Drei Männer"]
  prompt, keys = pair.prompt(texts), jax.random.split(jax.random.key(0), 3)

  def decode(gamma):
    return pair.decode_fn(Sampling(0.0), chain(gamma))(prompt, keys, max_new_tokens=12)

  plain, fast = decode(0), decode(3)
  np.testing.assert_array_equal(plain.tokens, fast.tokens)
  assert fast.rounds.acceptance_counts()[0].sum() > 3
  forced = jax.jit(module_of(CONFIG).apply)
  for row, text in enumerate(
    texts
  ):  # one forward pass over the whole text, with the stored parameters
    ids = vocabulary.encode(text)[:-1] or [300]
    written = plain.tokens[row][: plain.lengths[row]].tolist()
    inputs = np.pad([*ids, *written], (0, 40 - len(ids) - len(written)))[None]
    logits = forced({"params": params(CONFIG)}, inputs, inputs)[0]
    assert logits.argmax(-1)[len(ids) - 1 :][: len(written)].tolist() == written


# Settings that concern the prompt, and the texts of transformers 5.24 after two prompts. One has
# token 0, which is no padding; the EOS that our encoder appends is no token of a prompt.
PROMPTS = ["A man! runs!", "Two dogs, a girl"]
LIKELY = dict(sequence_bias=[[[300], 2.0], [[0], 4.0]], max_new_tokens=6)
OF_PROMPT = {
  "penalty": (dict(encoder_repetition_penalty=3.0), [[0] * 6, [256] * 6]),
  "inverse penalty": (dict(encoder_repetition_penalty=0.5), [[300], [0, 0, 0, 300]]),
  "1-grams": (dict(encoder_no_repeat_ngram_size=1), [[300], [0, 0, 0, 300]]),
  "2-grams and beams": (
    dict(encoder_no_repeat_ngram_size=2, encoder_repetition_penalty=2.0, num_beams=2),
    [[0] * 6, [256] * 6],
  ),
}


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=() if x == "1-grams" else pytest.mark.slow) for x in OF_PROMPT],
)
def test_settings_of_the_prompt_are_those_of_transformers(folders, vocabulary, name):
  settings, want = OF_PROMPT[name]
  pair = load_pair(*folders, vocabulary.path)
  outputs = pair.generate(PROMPTS, gamma=2, batch_size=2, **settings, **LIKELY)
  assert [output.tokens.tolist() for output in outputs] == want


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PROMPT)
def test_texts_with_settings_of_the_prompt_by_transformers(folders, vocabulary, name):
  torch = pytest.importorskip("torch")
  from transformers import GPT2LMHeadModel

  settings, want = OF_PROMPT[name]
  model = GPT2LMHeadModel.from_pretrained(folders[0])
  for prompt, tokens in zip(PROMPTS, want, strict=True):
    ids = torch.tensor([vocabulary.encode(prompt)[:-1]])
    row = model.generate(input_ids=ids, pad_token_id=300, **settings, **LIKELY)[0]
    assert row[ids.shape[1] :].tolist() == tokens


def test_incompatible_models_and_vocabularies_are_rejected(folders, vocabulary, tmp_path):
  target, draft = folders
  arrays = tensors(params(CONFIG))
  other = write(tmp_path / "other", arrays, eos_token_id=0)
  advice = "target, draft and vocabulary must agree"
  said = f"The draft in {other} ends a text with token 0 but {vocabulary.path} with 300"
  assert_rejected(lambda: load_pair(target, other, vocabulary.path), said, advice)
  assert_rejected(
    lambda: load_pair(other, draft, vocabulary.path), "The target in", "token 0", advice
  )
  tokenizer = byte_pairs()
  tokenizer.add_tokens(["<|pad|>"])
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  wider = str(tmp_path / "tokenizer.json")
  assert_rejected(
    lambda: load_pair(target, draft, wider), "a vocabulary of 301 tokens", "302", advice
  )


# Comparison with PyTorch.


def saved(folder, size, seed=0, noise=0.0, **how):
  """Save a random GPT-2 with two layers and `size` tokens, and return PyTorch's model."""
  torch = pytest.importorskip("torch", reason="PyTorch is not installed")
  transformers = pytest.importorskip("transformers", reason="transformers is not installed")
  shard = how.pop("max_shard_size", "5GB")
  about = dict(vocab_size=size, n_layer=2, bos_token_id=size - 1, eos_token_id=size - 1)
  torch.manual_seed(seed)
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**about, **how)).eval()
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if "ln_" in name or "bias" in name:  # all ones or zeros, so swapped ones would not differ
        weight += 0.3 * torch.randn_like(weight)
      elif "wte" not in name:  # large enough for earlier tokens to matter
        weight *= 3
      weight += noise * weight.std() * torch.randn_like(weight)
  model.save_pretrained(folder, max_shard_size=shard)
  return model


@pytest.mark.slow
@pytest.mark.parametrize(
  "how",
  [
    {},
    dict(max_shard_size="40MB", n_inner=1000, tie_word_embeddings=False),
    dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    dict(scale_attn_weights=False, activation_function="relu"),
  ],
  ids=["published", "several files", "scaled by layer", "not scaled"],
)
def test_logits_equal_those_of_pytorch(tmp_path, how):
  vocab_size = 50257 if not how or "max_shard_size" in how else 1000
  model = saved(tmp_path, vocab_size, **how)
  assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == ("max_shard_size" in how)
  config = open_checkpoint(str(tmp_path)).config
  if not how:
    assert config == gpt_config("small", "gpt2", num_decoder_layers=2)
  inputs = np.random.default_rng(0).integers(0, vocab_size, (2, 50))
  with pytest.importorskip("torch").no_grad():
    want = model(pytest.importorskip("torch").tensor(inputs)).logits.numpy()
  assert np.std(want) > 0.3
  for fused in (False, True):
    if fused:
      config = dataclasses.replace(config.with_layout(fused=True), tied_logits=False)
    got = jax.jit(module_of(config).apply)(
      {"params": open_checkpoint(str(tmp_path)).load(config)}, inputs, inputs
    )
    np.testing.assert_allclose(got, want, atol=5e-5, rtol=0)


@pytest.mark.slow
def test_speculative_decoding_emits_the_tokens_of_greedy_decoding_by_pytorch(tmp_path, vocabulary):
  model = saved(tmp_path / "target", 301)
  saved(tmp_path / "draft", 301, noise=0.05)
  pair = load_pair(str(tmp_path / "target"), str(tmp_path / "draft"), vocabulary.path)
  for text in ("A man runs through the", ""):
    decoded = pair.decode_fn(Sampling(0.0), chain(3))(
      pair.prompt([text], width=16), jax.random.split(jax.random.key(0), 1), max_new_tokens=40
    )
    ids = vocabulary.encode(text)[:-1] or [vocabulary.eos_id]
    torch = pytest.importorskip("torch")
    (want,) = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False).tolist()
    want = want[len(ids) :]
    assert len(set(want)) > 5
    assert decoded.tokens[0][: len(want)].tolist() == want
    assert decoded.lengths[0] == len(want)
    assert 0 < decoded.rounds.acceptance_counts()[0] < 40
