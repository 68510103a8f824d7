"""Audio files as samples at 16 kHz, and the log-mel spectrogram of Whisper."""

import functools
import io
import os
import pathlib
import struct

import numpy as np
from jaxtyping import Float

from specdec_jax.errors import InputError, require_number

SAMPLE_RATE, HOP = 16_000, 160  # samples per second, and between frames
_WIDTH, _BLOCK = 400, 1024  # samples of a frame; frames transformed at once, which fit in a cache
_MAX_HOURS = 12  # of a compressed file
# By format tag (1: PCM, 3: IEEE float) and bits. Samples of 24 bits are read as three bytes.
_TYPES = {(1, 8): "u1", (1, 16): "i2", (1, 24): "u1", (1, 32): "i4", (3, 32): "f4", (3, 64): "f8"}
_SCALES = {"float32": 1, "float64": 1, "uint8": 2**7, "int16": 2**15, "int32": 2**31}


def read_audio(
  source: str | os.PathLike | bytes | np.ndarray, sample_rate: int | None = None
) -> Float[np.ndarray, " samples"]:
  """Return a recording as float32 samples at 16 kHz, the mean of its channels.

  `source` is the path or the content of a file, or an array [T] or [T, channels] of integers or of
  floats in [-1, 1], with `sample_rate` samples per second (16,000 by default). WAV files need no
  further package; they may be truncated, or have no length in the header. Others need soundfile.

  Raises:
    InputError: there is no such file, it is not audio, or soundfile is not installed.
  """
  name = "the audio" if isinstance(source, bytes | np.ndarray) else os.fspath(source)
  if isinstance(source, str | os.PathLike):
    if not os.path.isfile(source):
      raise InputError(f"There is no audio file at {name}.")
    source = pathlib.Path(source).read_bytes()
  if isinstance(source, bytes):
    source, sample_rate = _read_wav(source) or _read_with_soundfile(source, name)
  rate = SAMPLE_RATE if sample_rate is None else sample_rate
  require_number(f"the sample rate of {name}", rate, 1000, 768_000)
  samples = _mono(source, name)
  if rate == SAMPLE_RATE:
    return samples
  from scipy.signal import resample_poly  # slow to import

  return resample_poly(samples, SAMPLE_RATE, int(rate))


def _read_wav(data: bytes) -> tuple[np.ndarray, int] | None:
  """Return samples [T, channels] and their rate, or None if `data` is no WAV file of `_TYPES`."""
  chunks, start = {b"fmt ": b"", b"data": b""}, 12
  while data[:4] + data[8:12] == b"RIFFWAVE" and start + 8 <= len(data) and not chunks[b"data"]:
    name, size = struct.unpack_from("<4sI", data, start)
    size = len(data) if (name, size) == (b"data", 0) else size  # a stream of unknown length
    chunks[name] = data[start + 8 : start + 8 + size]
    start += 8 + size + size % 2
  header = chunks[b"fmt "].ljust(26, b"\0")
  tag, channels, rate, _, width, bits = struct.unpack_from("<HHIIHH", header)
  tag = int.from_bytes(header[24:26], "little") if tag == 0xFFFE else tag  # WAVE_FORMAT_EXTENSIBLE
  if (tag, bits) not in _TYPES or channels == 0 or width != channels * bits // 8:
    return None
  whole = len(chunks[b"data"]) // width * width
  samples = np.frombuffer(chunks[b"data"][:whole], f"<{_TYPES[tag, bits]}")
  if bits == 24:
    samples = np.pad(samples.reshape(-1, 3), [(0, 0), (1, 0)]).view("<i4")
  return samples.reshape(-1, channels), rate


def _read_with_soundfile(data: bytes, name: str) -> tuple[np.ndarray, int]:
  try:
    import soundfile
  except ImportError as error:
    raise InputError(
      f"{name} is no intact WAV file of plain samples; other formats need soundfile, which is not "
      "installed; run pip install 'specdec_jax[audio]' (in a checkout, '.[audio]')."
    ) from error
  try:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
      if (hours := file.frames / file.samplerate / 3600) > _MAX_HOURS:  # of few bytes
        raise InputError(f"{name} has {hours:.0f} hours; at most {_MAX_HOURS} are read at once.")
      return file.read(dtype="float32"), file.samplerate
  except (soundfile.LibsndfileError, MemoryError) as error:  # the latter of damaged lengths
    raise InputError(f"{name} cannot be read: {getattr(error, 'error_string', error)}") from error


def _mono(samples: np.ndarray, name: str) -> Float[np.ndarray, " samples"]:
  kind, shape = samples.dtype.name, samples.shape
  if samples.size == 0:
    raise InputError(f"{name} has no samples.")
  if kind not in _SCALES or samples.ndim not in (1, 2) or len(samples) < shape[-1]:
    raise InputError(f"{name} is {kind} {shape}, not [T] or [T, channels] of {[*_SCALES]}.")
  channels = samples.reshape(len(samples), -1)
  total = np.einsum("tc->t", channels, dtype=np.float32, casting="unsafe")  # without a float copy
  mean = total / (_SCALES[kind] * channels.shape[1]) - (kind == "uint8")
  if not (peak := np.abs(mean).max()) <= 16:  # some codecs exceed 1; integers in floats exceed 16
    raise InputError(f"{name} has samples of magnitude {peak:g}; they must lie in [-1, 1].")
  return mean


@functools.cache
def _mel_filters(num_mels: int) -> Float[np.ndarray, "frequencies mels"]:
  """Return triangles of area 1 with corners equidistant in mels (Slaney, 1998), up to 8 kHz."""
  mels = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), num_mels + 2)  # linear up to 1 kHz
  corners = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
  frequencies = np.fft.rfftfreq(_WIDTH, 1 / SAMPLE_RATE)
  triangles = zip(corners, corners[1:], corners[2:])
  filters = [np.interp(frequencies, x, [0, 2 / (x[2] - x[0]), 0]) for x in triangles]
  return np.stack(filters, axis=1).astype(np.float32)


def log_mel(
  audio: Float[np.ndarray, " samples"], num_mels: int = 80, min_samples: int = 0
) -> Float[np.ndarray, "frames mels"]:
  """Return Whisper's log-mel spectrogram of a recording at 16 kHz: len(audio) // 160 frames.

  Large-v3 and turbo have 128 mels. Zeros extend `audio` to `min_samples`. Whisper needs 480,000: a
  clip of up to 30 s is padded before the spectrogram. Of a longer recording, which is not padded,
  the caller pads the last window with frames of zeros.
  Source: Radford et al., 2022, Section 2.2; `WhisperFeatureExtractor` of transformers 5.24.
  """
  audio = np.pad(audio, (0, max(0, min_samples - len(audio))))
  log = np.empty((len(audio) // HOP, num_mels), np.float32)
  audio = np.pad(audio, _WIDTH // 2, mode="reflect")  # frames are centered
  frames = np.lib.stride_tricks.sliding_window_view(audio, _WIDTH)[::HOP][: len(log)]
  window = np.hanning(_WIDTH + 1)[:-1].astype(np.float32)  # periodic
  for start in range(0, len(log), _BLOCK):
    block = slice(start, start + _BLOCK)
    spectrum = np.fft.rfft(frames[block] * window)
    np.matmul(spectrum.real**2 + spectrum.imag**2, _mel_filters(num_mels), out=log[block])
  np.log10(np.maximum(log, 1e-10, out=log), out=log)
  np.maximum(log, log.max(initial=-10) - 8, out=log)
  return np.divide(log + 4, 4, out=log)
