"""Time logits processors and sampling methods in the rounds of the bundled pair:

python scripts/measure_processors.py captions.en > experiments/processors/results.jsonl

A round with a setting is compared with a round without it, in one process and interleaved. No token
is EOS, so that texts do not end and all settings run the same number of rounds. Prefill is not
timed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

import specdec_jax
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.generation import GenerationConfig
from specdec_jax.machine import provenance
from specdec_jax.tries import TrieConstraint

NUM_TEXTS, NUM_ROUNDS, GAMMA, REPEATS = 16, 8, 5, 15
ENDLESS = -1  # an EOS id that no token has


def settings_of(constraint: TrieConstraint) -> dict[str, dict]:
  """Return the settings to time."""
  return {
    "repetition_penalty": dict(repetition_penalty=1.2),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.2),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=3),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=3),
    "bad_words_ids": dict(bad_words_ids=[[5, 6], [7]]),
    "suppress_tokens": dict(suppress_tokens=[5, 6, 7]),
    "sequence_bias": dict(sequence_bias={(5, 6): 1.0}),
    "min_length": dict(min_length=3),
    "forced_bos_token_id": dict(forced_bos_token_id=9),
    "trie": dict(logits_processor=constraint),
    "temperature": dict(temperature=1.0),
    "temperature, top_k": dict(temperature=1.0, top_k=40),
    "temperature, top_p": dict(temperature=1.0, top_p=0.9),
    "temperature, min_p": dict(temperature=1.0, min_p=0.05),
    "temperature, typical_p": dict(temperature=1.0, typical_p=0.9),
    "temperature, epsilon_cutoff": dict(temperature=1.0, epsilon_cutoff=3e-4),
    "temperature, eta_cutoff": dict(temperature=1.0, eta_cutoff=3e-4),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("texts", help="file with one source per line")
  args = parser.parse_args()
  pair = specdec_jax.load_pair()
  with open(args.texts, encoding="utf-8") as file:
    texts = [line.strip() for line, _ in zip(file, range(NUM_TEXTS))]
  eos_id, rng = pair.vocabulary.eos_id, np.random.default_rng(0)
  sequences = rng.integers(3, pair.target.vocab_size, (1000, 12)).tolist()
  settings = settings_of(TrieConstraint.of(sequences, eos_id))
  width = max(len(pair.encode(text)) for text in texts)
  for batch_size in (1, 8):
    prompts = [
      pair.prompt(texts[start : start + batch_size], width)
      for start in range(0, NUM_TEXTS, batch_size)
    ]

    def rounds_of(given: dict, prompts=prompts, batch_size=batch_size) -> Callable[[], float]:
      """Return a function that runs rounds with a setting and returns the seconds per round."""
      processors = GenerationConfig(**given).processors(pair.target.vocab_size, (eos_id,))
      sampling = GenerationConfig(**given).sampling()
      decoder = pair.decoder(sampling, chain(GAMMA), eos_id=ENDLESS, processors=processors)
      init = jax.jit(decoder.init, static_argnums=3)
      run = jax.jit(
        lambda params, state: lax.fori_loop(
          0, NUM_ROUNDS, lambda _, state: decoder.round(params, state), state
        )
      )
      states = [
        init(pair.params, prompt, row_keys(0, number, batch_size), NUM_ROUNDS * (GAMMA + 1))
        for number, prompt in enumerate(prompts)
      ]

      def seconds_per_round() -> float:
        started = time.perf_counter()
        for state in states:
          jax.block_until_ready(run(pair.params, state))
        return (time.perf_counter() - started) / NUM_ROUNDS / len(states)

      return seconds_per_round

    for name, given in settings.items():
      base = {"temperature": 1.0} if name.startswith("temperature, ") else {}
      timed, compared = rounds_of(given), rounds_of(base)
      timed(), compared()  # compiles
      times = [(timed(), compared()) for _ in range(REPEATS)]
      record = dict(
        setting=name,
        compared_with="temperature 1" if base else "temperature 0",
        batch_size=batch_size,
        gamma=GAMMA,
        texts=NUM_TEXTS,
        rounds=NUM_ROUNDS,
        repeats=REPEATS,
        ratio=statistics.median(with_it / without for with_it, without in times),
        round_ms=1e3 * statistics.median(without for _, without in times),
        added_ms=1e3 * statistics.median(with_it - without for with_it, without in times),
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
