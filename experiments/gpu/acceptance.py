"""Measure the acceptance of a head's draft tokens by depth and rank, at temperature 0.

python -m experiments.gpu.acceptance >> experiments/gpu/acceptance.jsonl

The bundled target decodes captions. The head of kind 'features' in `experiments/learned_drafts`
then drafts from each token of each output. A draft token of rank r at depth d is accepted if the
target's token is the head's r-th most probable one, given that the tokens before it in the round
had ranks below WIDTH. Nothing is timed.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.measure import ROOT, captions
from experiments.lib import script
from experiments.lib.autoregressive import generate
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.drafts.heads.base import TargetOutputs
from specdec_jax.load import load_pair
from specdec_jax.measure.alpha import teacher_forced
from specdec_jax.measure.machine import provenance

HEAD = pathlib.Path("experiments/learned_drafts/weights/features")
DEPTH, WIDTH = 8, 5


def main() -> None:
  pair = load_pair(draft=str(ROOT / HEAD), kernels="xla")
  head = pair.draft.build(Sampling(0.0), chain(1)).model.head
  target, target_params = pair.target.model, pair.target.params

  @jax.jit
  def ranks_in_rounds(prompt, tokens, first):
    """Return the rank of each token, with rounds at `first` and every DEPTH tokens later."""
    _, hidden, inputs, cache = teacher_forced(target, target_params, prompt, tokens)
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    outputs = TargetOutputs(inputs, hidden, cache, None, prompt, tokens, 0.0)
    position = jnp.arange(tokens.shape[1])
    anchors = jnp.maximum(position - (position - first) % DEPTH, 0)
    anchors = jnp.broadcast_to(anchors, tokens.shape)
    logits = head.after_each(pair.draft.params, outputs, anchors)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    return (logits > own).sum(axis=-1)

  accepted, reached = np.zeros((DEPTH, WIDTH), int), np.zeros(DEPTH, int)
  settings = DecodeSettings(Sampling(0.0), batch_size=8, max_new_tokens=64)
  batches = generate(pair, captions(), settings, 4_000)
  for prompt, _, output in batches:
    for first in range(DEPTH):
      ranks = np.asarray(ranks_in_rounds(prompt, output.tokens, first))
      for row, length in zip(ranks, output.lengths):
        for start in range(first, int(length), DEPTH):
          for depth, rank in enumerate(row[start : min(start + DEPTH, int(length))]):
            reached[depth] += 1
            if rank >= WIDTH:
              break
            accepted[depth, rank] += 1
  line = {
    "target": pair.target.name,
    "draft": str(HEAD),
    "temperature": 0.0,
    "tokens": int(sum(output.lengths.sum() for *_, output in batches)),
    "reached": reached.tolist(),
    "acceptance": (accepted / reached[:, None]).round(4).tolist(),
    **provenance(),
  }
  print(json.dumps(line))


if __name__ == "__main__":
  script.run(main)
