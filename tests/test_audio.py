"""Test that audio is read as it was written, and spectrograms against those of transformers."""

import io
import pathlib
import sys
import wave

import numpy as np
import pytest

from specdec_jax.errors import InputError
from specdec_jax.speech.audio import SAMPLE_RATE, log_mel, read_audio

SPEECH = sorted(pathlib.Path("../shared/data/speech").glob("*.[rw]a[wv]"))


def sine(hertz=440, rate=SAMPLE_RATE):
  return 0.4 * np.sin(2 * np.pi * hertz * np.arange(rate) / rate)


def wav(samples, width=2, rate=SAMPLE_RATE):
  """Return samples [T] or [T, channels] in [-1, 1] as a WAV file with PCM of `width` bytes."""
  integers = np.round(samples * 2.0 ** (8 * width - 1)).astype("<i8") + 128 * (width == 1)
  with wave.open(file := io.BytesIO(), "wb") as writer:
    writer.setparams((samples[0].size, width, rate, 0, "NONE", ""))
    writer.writeframes(integers.reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
  return file.getvalue()


def with_header(file, fields):
  """Return a file with other fields of 16 bits, which are given by their positions."""
  for at, field in fields.items():
    file = file[:at] + field.to_bytes(2, "little") + file[at + 2 :]
  return file


def float_wav(samples):
  fields = {20: 3, 32: samples.itemsize, 34: 8 * samples.itemsize, 40: 0, 42: 0}  # no length
  return with_header(PCM[:44], fields) + samples.tobytes()


PCM = wav(sine())
EXTENSION = bytes.fromhex("16001000040000000100000000001000800000AA00389B71")  # PCM
FILES = [
  PCM[:-3],  # two samples fewer
  with_header(PCM, {40: 0xFFFF, 42: 0xFFFF}),
  PCM[:36] + b"LIST\3\0\0\0abc\0" + PCM[36:] + b"LIST\4\0\0\0abcd",
  with_header(PCM[:36], {16: 40, 20: 0xFFFE}) + EXTENSION + PCM[36:],
  float_wav(sine().astype("<f4")),
  float_wav(sine().astype("<f8")),
]
INVALID = [
  ("absent.wav", "There is no audio file at absent.wav"),
  (b"Once upon a time", "(is no intact WAV|cannot be read)"),
  (PCM[:30], "(is no intact WAV|cannot be read)"),
  (with_header(PCM, {22: 0}), "(is no intact WAV|cannot be read)"),
  (PCM[:44], "has no samples"),
  (float_wav(np.array([0, np.nan])), "magnitude nan"),
  (np.array([0.0, 9000.0]), "magnitude 9000"),
  (np.zeros((2, 2, 2)), r"\(2, 2, 2\)"),
  (np.zeros((2, 100)), r"\(2, 100\)"),
  (np.zeros(9, np.int64), "int64"),
]


@pytest.mark.parametrize("file", FILES, ids=range(len(FILES)))
def test_variants_of_wav(file):
  length = SAMPLE_RATE - 2 * (file is FILES[0])
  np.testing.assert_allclose(read_audio(file), sine()[:length], atol=2**-15)


@pytest.mark.parametrize("width, dtype", [(1, "uint8"), (2, "int16"), (3, ""), (4, "int32")])
def test_channels_are_averaged(tmp_path, width, dtype):
  samples, path = np.stack([sine(), sine(1000), sine(2000)], axis=1), tmp_path / "three.wav"
  path.write_bytes(wav(samples, width))
  expected = samples.mean(axis=1).astype(np.float32)
  array = np.round(samples * 2.0 ** (8 * width - 1)) + 128 * (width == 1)
  for source in (path, str(path), path.read_bytes(), array.astype(dtype) if dtype else samples):
    atol = max(2.0 ** (-8 * width), 1e-7)
    np.testing.assert_allclose(read_audio(source), expected, atol=atol, strict=True)


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_resampling_keeps_low_frequencies_only(rate):
  samples = sine(440, rate) + (sine(11_000, rate) if rate > 22_050 else 0)
  resampled = read_audio(wav(samples, 4, rate))
  assert len(resampled) == SAMPLE_RATE and resampled.dtype == np.float32
  np.testing.assert_allclose(resampled[500:-500], sine()[500:-500], atol=2e-3)
  np.testing.assert_allclose(resampled, read_audio(samples, rate), atol=1e-5)
  with pytest.raises(InputError, match="the sample rate of the audio is 0"):
    read_audio(samples, 0)


@pytest.mark.parametrize("source, message", INVALID, ids=range(len(INVALID)))
def test_invalid_audio(tmp_path, source, message):
  path = tmp_path / "damaged.wav"
  if is_file := isinstance(source, bytes):
    path.write_bytes(source)
  with pytest.raises(InputError, match=message) as error:
    read_audio(path if is_file else source)
  assert is_file == (str(path) in str(error.value))


def test_flac_needs_soundfile(monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(InputError, match=r"specdec_jax\[audio\]"):
    patch.setitem(sys.modules, "soundfile", None)
    read_audio(b"fLaC")
  soundfile, file = pytest.importorskip("soundfile"), io.BytesIO()
  soundfile.write(file, np.stack([sine(), sine()], axis=1), SAMPLE_RATE, format="FLAC")
  np.testing.assert_allclose(read_audio(file.getvalue()), sine(), atol=2**-14)


def test_small_file_of_many_hours_is_refused():
  soundfile, file = pytest.importorskip("soundfile"), io.BytesIO()
  soundfile.write(file, np.zeros(13 * 3600 * 1000, np.int16), 1000, format="FLAC")
  assert len(file.getvalue()) < 1 << 18
  with pytest.raises(InputError, match="the audio has 13 hours"):
    read_audio(file.getvalue())


def test_log_mel_of_a_sine():
  mel = log_mel(0.1 * sine(), min_samples=30 * SAMPLE_RATE)
  assert mel.shape == (3000, 80) and {*mel[5:95].argmax(axis=1)} == {11}  # its center is 447 Hz
  np.testing.assert_allclose(log_mel(sine()), log_mel(0.1 * sine()) + 0.5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("clip", [0.02, 1.003, 30.0, 75.0, *SPEECH], ids=str)
def test_log_mel_equals_that_of_transformers(clip, num_mels):
  extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=num_mels)
  is_noise, noise = isinstance(clip, float), np.random.default_rng(0).standard_normal(1_200_000)
  audio = noise[: int(clip * 16_000)] if is_noise else np.fromfile(clip, "<i2")[22:] / 2**15
  for samples in np.float32([audio, 0 * audio]):
    for padding, min_samples in (("longest", 0), ("max_length", 480_000)):
      expected = extractor(samples, sampling_rate=16_000, padding=padding, truncation=False)
      mel = log_mel(samples, num_mels, min_samples)
      np.testing.assert_allclose(mel, expected.input_features[0].T, atol=1e-4)
