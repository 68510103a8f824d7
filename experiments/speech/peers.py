"""Whisper in other programs, for `speech`: encoder and decoder, called and timed apart.

All run with one beam at temperature 0, without timestamps, previous text, fallback and voice
activity detection, and with the suppressed tokens of the checkpoint. They are called in
subprocesses (`experiments.peers.worker.Process`).
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.peers.worker import after_idle
from experiments.speech import published
from specdec_jax.core.atomic_files import atomic_write


class Peer(NamedTuple):
  """Program with which a Whisper is decoded.

  Attributes:
    name: name of the program, and the format of its weights unless it is float32.
    package: package that it needs; programs of one package share a process.
    load: class below.
    settings: arguments of `load`.
    draft: name of its draft.
    gamma: number of draft tokens per round; 0 without a draft.
    is_batched: whether it decodes batches.
  """

  name: str
  package: str
  load: Callable[..., Any]
  settings: Mapping[str, Any]
  draft: str = "none"
  gamma: int = 0
  is_batched: bool = True


def num_threads() -> int:
  return len(os.sched_getaffinity(0))


def ctranslate2_folder(name: str, output: str | os.PathLike) -> str:
  """Write a published model to a new folder as CTranslate2 reads it; return the folder."""
  folder, weights = pathlib.Path(output), published.files(name)
  if (folder / "model.bin").exists():
    return str(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for file in ("config.json", "tokenizer.json", "vocabulary.json"):
    shutil.copy(weights[-1].with_name(file), folder)
  with atomic_write(folder / "model.bin", "wb") as model:
    model.writelines(part.read_bytes() for part in weights)
  return str(folder)


class CTranslate2:
  """CTranslate2, whose limit of new tokens is half of `max_length`."""

  def __init__(self, folder: str, compute_type: str, prompt: Sequence[int], limit: int):
    import ctranslate2

    self.view, self.prompt, self.limit = ctranslate2.StorageView.from_array, [*prompt], limit
    self.model = ctranslate2.models.Whisper(
      folder, compute_type=compute_type, inter_threads=1, intra_threads=num_threads()
    )

  def encode(self, mel: Float[np.ndarray, "1 M F"]) -> Float[np.ndarray, "1 S E"]:
    return np.array(self.model.encode(self.view(mel), to_cpu=True))

  def decode(self, encoded: Float[np.ndarray, "B S E"]) -> list[list[int]]:
    prompts = [self.prompt] * len(encoded)
    results = self.model.generate(
      self.view(encoded), prompts, beam_size=1, max_length=2 * self.limit
    )
    return [result.sequences_ids[0] for result in results]


class Transformers:
  """transformers in PyTorch, with `lookup` copied draft tokens per round (prompt lookup)."""

  def __init__(self, folder: str, limit: int, lookup: int = 0):
    import torch
    import transformers

    torch.set_num_threads(num_threads())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    load = transformers.WhisperForConditionalGeneration.from_pretrained
    self.model = load(folder, dtype=torch.float32).eval().requires_grad_(False)
    self.settings: dict[str, Any] = dict(do_sample=False, max_new_tokens=limit)
    if lookup:
      self.settings["prompt_lookup_num_tokens"] = lookup

  def encode(self, mel: Float[np.ndarray, "1 M F"]) -> Float[np.ndarray, "1 S E"]:
    import torch

    with torch.inference_mode():
      return self.model.model.encoder(torch.from_numpy(mel)).last_hidden_state.numpy()

  def decode(self, encoded: Float[np.ndarray, "B S E"]) -> list[list[int]]:
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    with torch.inference_mode():
      rows = self.model.generate(
        encoder_outputs=BaseModelOutput(torch.from_numpy(encoded)),
        language="en",
        task="transcribe",
        return_timestamps=False,
        **self.settings,
      )
    return rows.tolist()


class FasterWhisper:
  """faster-whisper with its defaults: five beams, fallback, timestamps and previous text."""

  def __init__(self, folder: str):
    from faster_whisper import WhisperModel

    self.model = WhisperModel(
      folder, device="cpu", compute_type="float32", cpu_threads=num_threads()
    )

  def transcribe(self, samples: Float[np.ndarray, " samples"]) -> str:
    segments, _ = self.model.transcribe(samples, language="en")
    return "".join(segment.text for segment in segments)


# The following functions run in a subprocess.

_LOADED: dict[tuple[str, str], Any] = {}  # programs, by name and draft
_ENCODED: dict[str, dict[int, np.ndarray]] = {}  # encoded clips, by name of the program


def load(peer: Peer) -> None:
  _LOADED[peer.name, peer.draft] = peer.load(**peer.settings)


def encode(key: tuple[str, str], clip: int, mel: np.ndarray) -> tuple[float, None]:
  """Encode a clip for `decode`; return the seconds."""
  seconds, encoded = after_idle(_LOADED[key].encode, mel)
  _ENCODED.setdefault(key[0], {})[clip] = encoded
  return seconds, None


def decode(key: tuple[str, str], clips: Sequence[int]) -> tuple[float, list[list[int]]]:
  """Decode clips that the program has encoded; return the seconds and the tokens."""
  encoded = np.concatenate([_ENCODED[key[0]][clip] for clip in clips])
  return after_idle(_LOADED[key].decode, encoded)


def transcribe(key: tuple[str, str], samples: np.ndarray) -> tuple[float, str]:
  return after_idle(_LOADED[key].transcribe, samples)
