"""Time logits processors in the rounds of the bundled pair:

python scripts/measure_processors.py captions.en > experiments/processors/results.jsonl

A round with a setting is compared with a round without it, in one process and interleaved. Outputs
differ between settings, so times are divided by the number of rounds.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

import specdec_jax
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.generation import GenerationConfig
from specdec_jax.machine import provenance
from specdec_jax.tries import TrieConstraint

NUM_TEXTS, MAX_NEW_TOKENS, GAMMA, REPEATS = 24, 64, 5, 11


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

    def seconds_per_round(given: dict, prompts=prompts, batch_size=batch_size) -> float:
      config = GenerationConfig(**given)
      processors = config.processors(pair.target.vocab_size, (eos_id,))
      decoder = pair.decoder(config.sampling(), chain(GAMMA), processors=processors)
      started, rounds = time.perf_counter(), 0
      for number, prompt in enumerate(prompts):
        keys = row_keys(0, number * batch_size, batch_size)
        result = decoder.run(pair.params, prompt, keys, max_new_tokens=MAX_NEW_TOKENS)
        rounds += int(jax.block_until_ready(result).num_rounds)
      return (time.perf_counter() - started) / rounds

    for name, given in settings.items():
      base = {"temperature": 1.0} if name.startswith("temperature, ") else {}
      for one in (given, base):  # compiles
        seconds_per_round(one)
      times = [(seconds_per_round(given), seconds_per_round(base)) for _ in range(REPEATS)]
      record = dict(
        setting=name,
        compared_with="temperature 1" if base else "temperature 0",
        batch_size=batch_size,
        gamma=GAMMA,
        texts=NUM_TEXTS,
        repeats=REPEATS,
        ratio=statistics.median(with_it / without for with_it, without in times),
        round_ms=1e3 * statistics.median(without for _, without in times),
        added_ms=1e3 * statistics.median(with_it - without for with_it, without in times),
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
