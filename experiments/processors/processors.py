"""Time logits processors and sampling methods in the rounds of the bundled pair:

python -m experiments.processors.processors captions.en > experiments/processors/results.jsonl

or temperature, top-k and top-p in the rounds of a random model with a large vocabulary, whose
layers have the form of T5Gemma's:

python -m experiments.processors.processors --vocab_size 256000 \\
  > experiments/processors/vocabulary.jsonl

A round with a setting is compared with a round without it, in one process and interleaved. No token
is EOS, so that texts do not end and all settings run the same number of rounds. Prefill is not
timed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

import specdec_jax
from experiments.lib import script
from experiments.lib.records import measured_on
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.processors import TrieConstraint
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import init_params
from specdec_jax.models.t5 import T5Model

PROCESSORS_LEGEND = {
  "batch N": "time of a round with the setting / without it",
  "added, ms": "time that the setting adds to a round",
}

GAMMA = 5
ENDLESS = -1  # an EOS id that no token has


class Models(NamedTuple):
  """A target, a draft and prompts, and how they are timed.

  Attributes:
    decoder: function of a `GenerationConfig` that returns a decoder.
    params: parameters of both models.
    prompts: function of a batch size that returns the batches.
    settings: arguments of `GenerationConfig` by the name of a setting.
    num_rounds: number of rounds of each batch.
    repeats: number of times that each setting is timed.
  """

  decoder: Callable[..., Decoder]
  params: Any
  prompts: Callable[[int], list]
  settings: dict[str, dict]
  num_rounds: int
  repeats: int


def settings_of(constraint: TrieConstraint) -> dict[str, dict]:
  """Return logits processors and sampling methods to time."""
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
    **METHODS,
  }


METHODS: dict[str, dict] = {
  "temperature": dict(temperature=1.0),
  "temperature, top_k": dict(temperature=1.0, top_k=40),
  "temperature, top_p": dict(temperature=1.0, top_p=0.9),
  "temperature, min_p": dict(temperature=1.0, min_p=0.05),
  "temperature, typical_p": dict(temperature=1.0, typical_p=0.9),
  "temperature, epsilon_cutoff": dict(temperature=1.0, epsilon_cutoff=3e-4),
  "temperature, eta_cutoff": dict(temperature=1.0, eta_cutoff=3e-4),
}


def bundled_pair(path: str) -> Models:
  """Return the bundled pair, with 16 texts of a file as prompts."""
  pair = specdec_jax.load_pair()
  with open(path, encoding="utf-8") as file:
    texts = [line.strip() for line, _ in zip(file, range(16))]
  eos_id, rng = pair.vocabulary.eos_id, np.random.default_rng(0)
  vocab_size, width = pair.target.model.vocab_size, max(len(pair.encode(text)) for text in texts)
  sequences = rng.integers(3, vocab_size, (1000, 12)).tolist()

  def decoder(given: GenerationConfig) -> Decoder:
    processors = given.processors(vocab_size, (eos_id,))
    return pair.decoder(given.sampling(), chain(GAMMA), eos_id=ENDLESS, processors=processors)

  def prompts(batch_size: int) -> list:
    starts = range(0, len(texts), batch_size)
    return [pair.prompt(texts[start : start + batch_size], width) for start in starts]

  settings = settings_of(TrieConstraint.of(sequences, eos_id))
  return Models(decoder, pair.params, prompts, settings, num_rounds=8, repeats=15)


def random_pair(vocab_size: int) -> Models:
  """Return random models with 6 and 2 layers of width 512, and random prompts.

  Their logits are multiplied by 8, so that few tokens have most of the probability, as in trained
  models.
  """
  configs = [
    T5Config(
      vocab_size=vocab_size,
      emb_dim=512,
      num_heads=8,
      num_kv_heads=4,
      head_dim=64,
      mlp_dim=1024,
      num_encoder_layers=1,
      num_decoder_layers=num_layers,
      norm_position="both",
      rope_theta=1e4,
    )
    for num_layers in (6, 2)
  ]
  target, draft = (T5Model(config) for config in configs)
  params = Params(*(init_params(config, jax.random.key(i)) for i, config in enumerate(configs)))
  for model_params in params:
    model_params["decoder"]["decoder_norm"]["scale"] *= 8

  def decoder(given: GenerationConfig) -> Decoder:
    sampling = given.sampling()
    model_draft = ModelDraft(draft, sampling, chain(GAMMA))
    return Decoder(target, model_draft, TokenVerifier(sampling), eos_id=ENDLESS)

  def prompts(batch_size: int) -> list:
    return [np.random.default_rng(0).integers(2, vocab_size, (batch_size, 16), np.int32)]

  settings = dict(list(METHODS.items())[:3])
  return Models(decoder, params, prompts, settings, num_rounds=2, repeats=7)


def processors_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of times of logits processors."""
  sizes = sorted({row["batch_size"] for row in rows})
  by_setting: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
  for row in rows:
    by_setting.setdefault((row["setting"], row["compared_with"]), {})[row["batch_size"]] = row
  cells = tuple(
    (
      *setting,
      *(f"{by_size[size]['ratio']:.3f}" for size in sizes),
      *(f"{by_size[size]['added_ms']:.2f}" for size in sizes),
    )
    for setting, by_size in by_setting.items()
  )
  columns = [f"batch {size}" for size in sizes] + [f"added, ms (batch {size})" for size in sizes]
  first = rows[0]
  return Table(
    "Time of logits processors and filters in a round",
    ("setting", "compared with", *columns),
    cells,
    (
      f"Gamma {first['gamma']}, medians of {first['repeats']} interleaved repeats. "
      f"{measured_on(rows)}",
    ),
    PROCESSORS_LEGEND,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("texts", nargs="?", help="file with one source per line")
  parser.add_argument("--vocab_size", type=int, help="size of the vocabulary of a random model")
  args = parser.parse_args()
  models = random_pair(args.vocab_size) if args.vocab_size else bundled_pair(args.texts)
  num_rounds = models.num_rounds
  for batch_size in (1, 8):
    prompts = models.prompts(batch_size)

    def rounds_of(given: dict, prompts=prompts, batch_size=batch_size):
      """Return a function that runs rounds and returns the seconds per round, and the size of the
      program's temporary arrays in MiB."""
      decoder = models.decoder(GenerationConfig(**given))
      init = jax.jit(decoder.init, static_argnums=3)
      states = [
        init(models.params, prompt, row_keys(0, number, batch_size), num_rounds * (GAMMA + 1))
        for number, prompt in enumerate(prompts)
      ]

      def run(params, state):
        return lax.fori_loop(0, num_rounds, lambda _, state: decoder.round(params, state), state)

      compiled = jax.jit(run).lower(models.params, states[0]).compile()
      memory: Any = compiled.memory_analysis()

      def seconds_per_round() -> float:
        started = time.perf_counter()
        for state in states:
          jax.block_until_ready(compiled(models.params, state))
        return (time.perf_counter() - started) / num_rounds / len(states)

      return seconds_per_round, memory.temp_size_in_bytes / 2**20

    for name, given in models.settings.items():
      base = {"temperature": 1.0} if name.startswith("temperature, ") else {}
      (timed, temp_mib), (compared, base_mib) = rounds_of(given), rounds_of(base)
      timed(), compared()
      times = [(timed(), compared()) for _ in range(models.repeats)]
      record = dict(
        setting=name,
        compared_with="temperature 1" if base else "temperature 0",
        batch_size=batch_size,
        gamma=GAMMA,
        texts=len(prompts) * batch_size,
        distinct_texts=len({row.tobytes() for prompt in prompts for row in np.asarray(prompt)}),
        rounds=num_rounds,
        repeats=models.repeats,
        ratio=statistics.median(with_it / without for with_it, without in times),
        round_ms=1e3 * statistics.median(without for _, without in times),
        added_ms=1e3 * statistics.median(with_it - without for with_it, without in times),
        round_mib=base_mib,
        added_mib=temp_mib - base_mib,
        **({"vocab_size": args.vocab_size} if args.vocab_size else {}),
        **provenance(),
      )
      print(json.dumps(record), flush=True)


if __name__ == "__main__":
  script.run(main)
