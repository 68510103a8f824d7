"""Write the outputs of a Whisper for windows of speech, as data to train draft heads on:

python -m experiments.speech.outputs --windows runs/speech/corpus/train --output runs/speech/train

For each window, the text that the target decodes at temperature 0, and at each of its tokens the
outputs of the target's last layers (`layers_of`) and the most probable tokens; and the keys and
values of the window in the target's last decoder layer, which draft heads share. Every second
window has timestamps. An interrupted run resumes.
"""

import argparse
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from experiments.lib import script
from experiments.speech import published
from specdec_jax import load_pair
from specdec_jax.core.context import Encoded
from specdec_jax.core.types import AnyPair
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import padded
from specdec_jax.measure.alpha import teacher_forced
from specdec_jax.models.families import with_feature_layers
from specdec_jax.models.whisper import WhisperModel
from specdec_jax.speech.audio import log_mel
from specdec_jax.speech.transcribe import Transcriber

LENGTH, TOP = 224, 16  # tokens of a text, and most probable tokens at each of them
BATCH = 8


def layers_of(config) -> tuple[int, ...]:
  """Return the layers of the target whose outputs are written as hidden states."""
  return tuple(range(max(0, config.num_decoder_layers - 3), config.num_decoder_layers))


def arrays(config, count: int) -> dict[str, tuple[tuple[int, ...], str]]:
  """Return shape and dtype of each array, by the name of its file."""
  cross = 2, config.kv_heads, config.source_positions, config.head_dim
  width = len(layers_of(config)) * config.emb_dim
  return {
    "prompts": ((count, 4), "int32"),  # tokens before a text; -1 after them
    "tokens": ((count, LENGTH), "int32"),  # EOS included; -1 after it
    "prompt_hidden": ((count, 4, width), "float16"),  # states at the tokens of prompts
    "hidden": ((count, LENGTH, width), "float16"),  # states that predict the tokens
    "top_tokens": ((count, LENGTH, TOP), "int32"),
    "top_probs": ((count, LENGTH, TOP), "float16"),
    "cross": ((count, *cross), "float16"),
  }


def write(pair: AnyPair, windows: str | os.PathLike, output_dir: str | os.PathLike) -> None:
  """Write the arrays for the finished windows of `corpus.make`, in whole batches."""
  speech = np.load(pathlib.Path(windows) / "windows.npy", mmap_mode="r")
  output = pathlib.Path(output_dir)
  output.mkdir(parents=True, exist_ok=True)
  done, config = output / "done.json", pair.config
  model = with_feature_layers(pair.target.model, layers_of(config))
  first = json.loads(done.read_text()) if done.exists() else 0
  files = {
    name: np.lib.format.open_memmap(
      output / f"{name}.npy", "r+" if first else "w+", np.dtype(dtype), shape
    )
    for name, (shape, dtype) in arrays(config, len(speech)).items()
  }
  transcriber = Transcriber(pair, language="en", gamma=0)
  encode = jax.jit(WhisperModel.encode, static_argnums=0)

  @jax.jit
  def outputs(params, prompt: Encoded, tokens):
    logits, hidden, _, cache = teacher_forced(model, params, prompt, tokens)
    prompt_hidden, _ = model.prefill(params, prompt, prompt.shape[1])
    probs, top = jax.lax.top_k(jax.nn.softmax(logits), TOP)
    cross = jnp.stack(cache.cross[-1], axis=1)
    half = jnp.float16
    return {
      "prompt_hidden": prompt_hidden.astype(half),
      "hidden": hidden.astype(half),
      "top_tokens": top,
      "top_probs": probs.astype(half),
      "cross": cross.astype(half),
    }

  finished = len(read_lines(pathlib.Path(windows) / "windows.jsonl"))
  steps = range(first, finished // BATCH * BATCH, BATCH)
  for step, start in enumerate(track(steps, "outputs", transient=True)):
    timed = bool((start // BATCH) % 2)
    batch = speech[start : start + BATCH]
    mels = [log_mel(x / np.float32(2**15), config.num_mels) for x in batch]
    sources = [encode(model, pair.params.target, jnp.asarray(mel)[None]) for mel in mels]
    before = [pair.target.speech.prompt("en", None, timed)] * len(batch)
    lengths = jnp.full(len(batch), len(before[0]), jnp.int32)
    prompt = Encoded(jnp.concatenate(sources), jnp.asarray(padded(before, 4)), lengths)
    decoder = transcriber.decoder(timed)
    result = decoder.run(pair.params, prompt, jax.random.key(0), max_new_tokens=LENGTH)
    tokens = np.where(np.arange(LENGTH) < np.asarray(result.lengths)[:, None], result.tokens, -1)
    width = -(-int(result.lengths.max()) // 32) * 32
    found = jax.device_get(outputs(pair.params.target, prompt, jnp.maximum(tokens[:, :width], 0)))
    rows = slice(start, start + len(batch))
    for name, values in found.items():
      files[name][rows, : values.shape[1]] = values
    files["tokens"][rows], files["prompts"][rows] = tokens, padded(before, 4, -1)
    if step % 10 == 9 or start == steps[-1]:
      for file in files.values():
        file.flush()
      done.write_text(json.dumps(start + BATCH))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--windows", required=True, help="folder of windows (corpus.py)")
  parser.add_argument("--output", required=True, help="folder to write")
  args = parser.parse_args()
  write(load_pair(str(published.folder("base"))), args.windows, args.output)


if __name__ == "__main__":
  script.run(main)
