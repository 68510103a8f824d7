"""Comparison of continuous batching, and of its log-probabilities, with one text at a time.

Short and long texts alternate, so that slots are reused early. Each text has its own limit, key and
source, and logits processors depend on all of these. Outputs are compared with those of one text at
a time.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import special

from specdec_jax.batching import Texts, decode_texts, one_row
from specdec_jax.core.counts import num_rounds
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree
from specdec_jax.exactness.argmax import (
  PAST_END,
  SHARES,
  Divergence,
  Rounding,
  first_divergences,
  logits_in_blocks,
  share_of,
  tokens_of,
)
from specdec_jax.exactness.processed import processed
from specdec_jax.measure.alpha import teacher_forced_logits
from specdec_jax.pair import Pair

BATCH_SIZE, NUM_TEXTS = 3, 12
FLOAT32 = 2e-5  # bound on the error of a log-softmax in float32


class SlotsResult(NamedTuple):
  """Number and first difference of each text that differs from that of the text alone.

  Further, the total number of rounds in slots, and one at a time; the largest error of a
  log-probability; and the largest error that is attributed to rounding.
  """

  divergences: list[tuple[int, Divergence]]
  num_rounds: tuple[int, int]
  error: float
  rounding: float


def compare_slots(
  pair: Pair,
  texts: Sequence[str],
  tree: AnyTree,
  settings: DecodeSettings,
  rounding: Rounding,
  processors: Processors = (),
) -> SlotsResult:
  """Decode NUM_TEXTS texts in BATCH_SIZE slots and one at a time, and compare the outputs.

  Log-probabilities of slots are compared with the float64 log-softmax of the logits of one forward
  pass over the output, before and after processors.
  """
  sampling, most = settings.sampling, settings.max_new_tokens
  decoder = pair.decoder(sampling, tree, processors=processors, logprobs=True)
  texts = [texts[i % len(texts)] for i in range(NUM_TEXTS)]
  texts = [text[: len(text) // 2 or 1] if i % 2 else text for i, text in enumerate(texts)]
  prompts, keys = pair.prompt(texts), row_keys(settings.seed, 0, NUM_TEXTS)
  lengths = [len(pair.encode(text)) for text in texts]
  # Slots take the texts with the longest sources first. In this order, every second one ends early.
  limits = np.full(NUM_TEXTS, most, np.int32)
  early = np.argsort(np.negative(lengths), kind="stable")[1::2]
  limits[early] = 1 + np.arange(len(early)) % most
  in_slots = decode_texts(
    decoder,
    pair.params,
    Texts(prompts.__getitem__, lengths, keys, limits),
    batch_size=BATCH_SIZE,
    max_new_tokens=most,
    has_encoder=not pair.continues,
  )
  by_text = {i: one_row(result, row) for i, result, row in in_slots}
  ours = [by_text[i] for i in range(NUM_TEXTS)]
  alone = [
    decoder.run(pair.params, prompts[i], keys[i], max_new_tokens=most, limit=limits[i])
    for i in np.arange(NUM_TEXTS)[:, None]
  ]
  tokens, expected = (np.concatenate([*map(tokens_of, results)]) for results in (ours, alone))
  target = pair.target.model, pair.target.params, prompts
  divergences = first_divergences(
    *(*target, expected, tokens, tree.num_nodes, rounding, processors, limits)
  )

  filled, is_text = jnp.maximum(tokens, 0), tokens != PAST_END
  in_blocks = (logits_in_blocks(*target, filled, block) for block in (1, tree.num_nodes))

  def log_probs(logits: Array) -> np.ndarray:
    after = processed(processors, pair.target.model, prompts, filled, limits, logits)
    columns = logits, after, after / (sampling.temperature or 1.0)
    exact = np.stack([special.log_softmax(np.asarray(x, float), axis=-1) for x in columns], -1)
    return np.take_along_axis(exact, np.asarray(filled)[..., None, None], axis=2)[is_text, 0]

  expected_log_probs = log_probs(plain := teacher_forced_logits(*target, filled))
  moved = max(float(np.abs(log_probs(x) - expected_log_probs).max()) for x in in_blocks)
  moved = min(moved, SHARES[pair.dtype] * float(np.ptp(plain)))
  errors = np.concatenate([result.log_probs for result in ours])[is_text] - expected_log_probs
  if dataclasses.replace(sampling, temperature=1.0) != Sampling():
    errors = errors[:, :2]  # the filters of the sampling method change the last column
  error = float(np.nan_to_num(np.abs(errors), nan=np.inf).max())
  by_number, rounds = [(d.row + 1, d) for d in divergences], (num_rounds(ours), num_rounds(alone))
  return SlotsResult(by_number, rounds, error, 2 * moved + FLOAT32)


# Processors that depend on the source and on the text so far.
PROCESSORS = GenerationConfig(
  encoder_repetition_penalty=1.5, repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=3
)


def slots_hold(
  pair: Pair, texts: Sequence[str], sampling: Sampling, tree: AnyTree
) -> tuple[bool, SlotsResult]:
  """Return whether texts in slots, and their log-probabilities, are those of one text at a time."""
  eos_ids, pad_id = (pair.vocabulary.eos_id,), pair.vocabulary.pad_id
  processors = PROCESSORS.processors(pair.target.model.vocab_size, eos_ids, pad_id)
  settings, rounding = DecodeSettings(sampling, BATCH_SIZE, 24, 0), Rounding(share_of(pair))
  found = compare_slots(pair, texts, tree, settings, rounding, processors)
  holds = found.error <= found.rounding and all(d.is_tie for _, d in found.divergences)
  if sampling.is_argmax:
    holds &= found.num_rounds[0] <= 1.01 * found.num_rounds[1]
  elif rounding.share and all(math.isfinite(d.gap) for _, d in found.divergences):
    # Rounding changes samples.
    holds = found.error <= found.rounding and len(found.divergences) <= NUM_TEXTS / 4
  return holds, found
