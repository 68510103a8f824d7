"""Folders of Hugging Face with a small random Whisper, and recordings of noise."""

import pathlib
import wave

import numpy as np
import pytest

SPECIAL = "endoftext startoftranscript en de translate transcribe startofprev nospeech notimestamps"
WORDS = "the a man dog two little runs sits on under of big red green house ball".split()
NUM_TIMESTAMPS = 1501


def folder(tmp: pathlib.Path, multilingual: bool = True, seed: int = 0) -> pathlib.Path:
  """Write a model into a new folder below `tmp`, and return the folder.

  It has `SPECIAL` tokens of two languages, 1.5 thousand timestamps, and texts of words and letters.
  Segments differ between recordings and windows. Models of all seeds have the same vocabulary.
  """
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  path = tmp / f"whisper{'' if multilingual else '.en'}-{seed}"
  path.mkdir()
  ids = write_tokenizer(path / "tokenizer.json")
  vocab_size = ids["notimestamps"] + 1 + NUM_TIMESTAMPS
  eos = ids["endoftext"]
  special = dict(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)
  special["decoder_start_token_id"] = ids["startoftranscript"]
  suppressed = [ids[name] for name in SPECIAL.split()[1:-1]]
  layers = {f"{stack}_layers": 1 for stack in ("encoder", "decoder")}
  layers |= {f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")}
  layers |= {f"{stack}_ffn_dim": 32 for stack in ("encoder", "decoder")}
  config = transformers.WhisperConfig(
    vocab_size=vocab_size,
    d_model=16,
    max_target_positions=48,
    init_std=0.4,
    suppress_tokens=suppressed,
    begin_suppress_tokens=[eos],
    **layers,
    **special,
  )
  torch.manual_seed(seed)
  model = transformers.WhisperForConditionalGeneration(config)
  table = model.model.decoder.embed_tokens.weight
  with torch.no_grad():  # timestamps are many, and the row of EOS is zero
    table[ids["notimestamps"] + 1 :] *= 0.5
    table[eos] = 0.8 * torch.randn(len(table[eos]))
  transcribe, no_timestamps = ids["transcribe"], ids["notimestamps"]
  languages = dict(
    lang_to_id={f"<|{code}|>": ids[code] for code in ("en", "de")},
    task_to_id={"transcribe": transcribe, "translate": ids["translate"]},
  )
  model.generation_config = transformers.GenerationConfig(
    forced_decoder_ids=[[1, None], [2, transcribe]] if multilingual else [[1, no_timestamps]],
    is_multilingual=multilingual,
    max_initial_timestamp_index=50,
    max_length=48,
    no_timestamps_token_id=no_timestamps,
    prev_sot_token_id=ids["startofprev"],
    return_timestamps=False,
    suppress_tokens=suppressed,
    begin_suppress_tokens=[eos],
    **(languages if multilingual else {}),
    **special,
  )
  model.save_pretrained(path)
  transformers.WhisperFeatureExtractor().save_pretrained(path)
  return path


def write_tokenizer(path: pathlib.Path) -> dict[str, int]:
  """Write a tokenizer of words, `SPECIAL` and timestamps, and return the ids of `SPECIAL`."""
  tokenizers = pytest.importorskip("tokenizers")
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, show_progress=False)
  tokenizer.train_from_iterator([" ".join(WORDS)] * 2, trainer)
  names = SPECIAL.split()
  special = tokenizers.AddedToken
  tokenizer.add_special_tokens([special(f"<|{name}|>", special=True) for name in names])
  times = [f"<|{i * 0.02:.2f}|>" for i in range(NUM_TIMESTAMPS)]
  tokenizer.add_tokens([special(time, normalized=False) for time in times])
  tokenizer.save(str(path))
  return {name: tokenizer.token_to_id(f"<|{name}|>") for name in names}


def write_noise(
  path: pathlib.Path, seconds: float, seed: int = 0, rate: int = 16_000
) -> pathlib.Path:
  """Write a WAV file of noise whose loudness changes every half second, and return its path."""
  rng = np.random.default_rng(seed)
  num_samples = round(seconds * rate)
  loudness = np.repeat(rng.uniform(0, 8000, num_samples // (rate // 2) + 1), rate // 2)
  samples = rng.normal(size=num_samples) * loudness[:num_samples]
  with wave.open(str(path), "wb") as file:
    file.setparams((1, 2, rate, 0, "NONE", ""))
    file.writeframes(samples.clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
  return path
