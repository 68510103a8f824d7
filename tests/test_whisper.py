"""Test Whispers of transformers as targets and drafts: logits, config and tokens of prompts."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
import tiny_whisper
from safetensors.numpy import load_file, save_file

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.errors import InputError
from specdec_jax.load import laid_out, load_pair
from specdec_jax.models.families import model_of
from specdec_jax.models.layout import for_device
from specdec_jax.models.whisper import SpeechTokens

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = dict(vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=2)
SIZES |= dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64)
SIZES |= dict(decoder_ffn_dim=64, max_source_positions=20, max_target_positions=24)
IDS = dict(decoder_start_token_id=81, pad_token_id=80, bos_token_id=80, eos_token_id=80)
TASKS = {"transcribe": 85, "translate": 84}
SPEECH = dict(no_timestamps_token_id=88, prev_sot_token_id=87, max_initial_timestamp_index=2)
MULTILINGUAL = dict(lang_to_id={"<|en|>": 82, "<|de|>": 83}, task_to_id=TASKS, **SPEECH)
ENGLISH = dict(is_multilingual=False, forced_decoder_ids=[[1, 88]], **SPEECH)
TOKENS = SpeechTokens(81, {"en": 82, "de": 83}, TASKS, (), 88, 87, 2)
OF_ENGLISH = SpeechTokens(81, {}, {}, (88,), 88, 87, 2)
KINDS = {  # fields of config.json and of generation_config.json, and tokens
  "multilingual": (dict(num_mel_bins=128, encoder_layers=3), MULTILINGUAL, TOKENS),
  "English-only": (dict(encoder_ffn_dim=48, encoder_attention_heads=2), ENGLISH, OF_ENGLISH),
}


def saved(folder, kind, dtype="float32", **how):
  """Save a Whisper with random weights, and return its PyTorch model in float32."""
  fields, generation, _ = KINDS[kind]
  torch.manual_seed(0)
  config = transformers.WhisperConfig(**SIZES | IDS | fields)
  model = transformers.WhisperForConditionalGeneration(config).eval()
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if name != "model.encoder.embed_positions.weight":  # sinusoids
        spread = 1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        weight += spread * torch.randn_like(weight)
  model.generation_config = transformers.GenerationConfig(**IDS, **generation)
  model.to(getattr(torch, dtype)).save_pretrained(folder, **how)
  return model.float()


def with_fields(folder, name="config.json", **fields):
  file = folder / name
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))
  return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, dict(dtype="float16"), dict(max_shard_size="50KB")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(tmp_path, kind, how):
  torch_model = saved(tmp_path, kind, **how)
  assert len([*tmp_path.glob("*.safetensors")]) > 1 or "max_shard_size" not in how
  checkpoint, rng = open_checkpoint(str(tmp_path)), np.random.default_rng(0)
  assert checkpoint.speech == KINDS[kind][2] and not checkpoint.generation.settings
  mels = rng.normal(size=(2, 40, checkpoint.config.num_mels)).astype(np.float32)
  texts = rng.integers(0, 96, (2, 12), np.int32)
  with torch.no_grad():
    inputs = torch.tensor(mels.swapaxes(1, 2)), None, torch.tensor(texts).long()
    want = torch_model(*inputs).logits.numpy()
  for kernels in ("xla", "auto"):
    config = laid_out(checkpoint.config, for_device("float32", kernels), None)
    params, module = checkpoint.load(config), model_of(config).module_type(config)
    apply = jax.jit(functools.partial(module.apply, {"params": params}))
    np.testing.assert_allclose(apply(mels, texts), want, atol=1e-5 * want.std(), rtol=0)
  assert np.abs(apply(mels[::-1], texts) - want).max() > 1  # the source matters


def test_config_has_the_settings_if_generation_config_is_missing(tmp_path):
  saved(tmp_path, "multilingual")
  (tmp_path / "generation_config.json").unlink()
  settings = dict(suppress_tokens=[5, 6], begin_suppress_tokens=[7], max_length=23)
  fields = dict(forced_decoder_ids=[[1, 82], [2, 85]], **settings)
  checkpoint = open_checkpoint(with_fields(tmp_path, **fields))
  assert checkpoint.speech == SpeechTokens(81, forced=(82, 85))
  assert checkpoint.generation.settings.items() >= settings.items()
  assert "forced_decoder_ids" not in checkpoint.generation.settings


@pytest.mark.parametrize(
  "given, arguments, prompt",
  [
    (dict(forced=(None, 85)), (None, None, True), [81, None, 85]),
    ({}, (None, "translate", False), [81, None, 84, 88]),
    (dict(language="de", task="translate"), (None, None, True), [81, 83, 84]),
  ],
)
def test_prompt(given, arguments, prompt):
  assert dataclasses.replace(TOKENS, **given).prompt(*arguments) == prompt
  assert [OF_ENGLISH.prompt(None, None, x) for x in (False, True)] == [[81, 88], [81]]
  assert [*map(TOKENS.code, ("de", "<|de|>", "German", "elvish"))] == ["de"] * 3 + ["elvish"]


def test_config_that_does_not_fit_is_reported(tmp_path):
  saved(tmp_path, "multilingual")
  for fields, message in (
    (dict(encoder_layers=2), "does not fit .* 15 arrays differ, encoder.layers.2.fc1.bias"),
    (dict(activation_function="relu"), "activation_function in .* is 'relu'; it must be 'gelu'"),
  ):
    with pytest.raises(InputError, match=message):
      checkpoint = open_checkpoint(with_fields(tmp_path, **fields))
      checkpoint.load(checkpoint.config)


@pytest.mark.parametrize("name, is_shared", [("decoder", True), ("encoder.conv1.weight", False)])
def test_draft_drops_an_encoder_that_the_target_has(tmp_path, name, is_shared):
  folder = tiny_whisper.folder(tmp_path)
  other = shutil.copytree(folder, tmp_path / "other")
  arrays = load_file(other / "model.safetensors")
  arrays = {key: x * 1.1 if name in key else x for key, x in arrays.items()}
  save_file(arrays, other / "model.safetensors", {"format": "pt"})
  pair = load_pair(str(folder), str(other))
  dropped = {"encoder", "conv1", "conv2"} if is_shared else set()
  assert {*pair.draft.params} == {*pair.target.params} - dropped
  assert (pair.draft.encoder is None) == is_shared


def test_model_of_texts_is_no_draft_of_a_whisper_nor_the_reverse(tmp_path):
  pad_id = tiny_whisper.NUM_TIMESTAMPS  # not EOS, which must not pad texts
  folder = with_fields(tiny_whisper.folder(tmp_path), pad_token_id=pad_id)
  target = load_pair(folder).target
  config = tiny.config(target.model.vocab_size, 1, eos_id=target.vocabulary.eos_id, pad_id=pad_id)
  of_texts = config, tiny.params(config, 0)
  for models in ((folder, of_texts), (of_texts, folder)):
    with pytest.raises(InputError, match="a model of speech.*must be of one kind"):
      load_pair(*models, vocabulary=target.vocabulary.path)


def test_tokenizer_may_lack_the_timestamps(tmp_path):
  folder = tiny_whisper.folder(tmp_path)
  tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
  with_fields(folder, "tokenizer.json", added_tokens=[x for x in tokens if x["special"]])
  pair = load_pair(str(folder))
  assert len(pair.vocabulary) == pair.target.model.vocab_size > tiny_whisper.NUM_TIMESTAMPS


def test_generate_is_for_texts(tmp_path):
  pair = load_pair(str(tiny_whisper.folder(tmp_path)))
  assert pair.draft.name == "none"  # the default
  for settings in ({}, dict(decoder_texts=["a"]), dict(decoder_input_ids=[[3]])):
    with pytest.raises(InputError, match="whisper-0 reads speech, not texts; call .*transcribe"):
      pair.generate(["a red ball"], **settings)
