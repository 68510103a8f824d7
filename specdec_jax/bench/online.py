"""Comparison of a draft that learns online with the same draft without learning."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
from rich.console import Console

from specdec_jax import records
from specdec_jax.bench.reporting.record_tables import online_table
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.counts import num_rounds, num_tokens
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.heads.stateless import SpeculatorDraft
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.pairs import LoadedPair
from specdec_jax.progress import Progress
from specdec_jax.reporting.formats import render
from specdec_jax.training.online import OnlineDraft, decode_and_learn


def serve_and_learn(
  pair: LoadedPair,
  inputs: Sequence[str],
  output_dir: str,
  num_texts: int = 200,
  every: int = 50,
  gamma: int = 5,
  temperature: float = 0.0,
  learning_rate: float = 0.003,
  max_new_tokens: int = 64,
  seed: int = 0,
) -> None:
  """Decode files with a frozen and an online version of a draft; print a table and write records.

  A record covers one version and up to `every` texts of a file. The online version learns from all
  files, in order.

  Args:
    pair: target and draft. Its `kernels` must be 'xla', and its draft must be a `pairs.speculator`.
    inputs: paths of text files, one file per domain and one text per line.
    output_dir: folder for `results.jsonl`. That file must not exist, because learning cannot be
      resumed.
    num_texts: maximum number of texts to decode from each file.
    every: maximum number of texts per record.
    gamma: number of draft tokens per round.
    temperature: sampling temperature; 0 is argmax.
    learning_rate: see `training.online.OnlineDraft`.
    max_new_tokens: maximum number of tokens of each output.
    seed: random seed of all sampling.

  Raises:
    InputError: the draft cannot learn, `results.jsonl` exists, or an argument is out of range.
  """
  require_types(serve_and_learn, locals())
  for name, value in (("num_texts", num_texts), ("every", every), ("gamma", gamma)):
    require_count(name, value)
  results = pathlib.Path(output_dir) / "results.jsonl"
  if results.exists():
    raise InputError(f"{results} is there already; delete it, or give another output_dir.")
  sampling = Sampling(temperature)
  frozen = pair.draft(sampling, chain(gamma))
  if not isinstance(frozen, SpeculatorDraft):
    raise InputError(
      f"{pair.draft_name} does not learn while it decodes; give a trained speculator."
    )
  head_params, target_params = pair.draft_params
  draft = OnlineDraft(frozen, learning_rate)
  learned, decode_frozen = draft.initial_state(head_params), pair.decode_fn(sampling, chain(gamma))
  decoder = Decoder(pair.target, draft, pair.verifier_for(sampling), pair.vocabulary.eos_id)
  settings = DecodeSettings(sampling, max_new_tokens=max_new_tokens, seed=seed)
  measured: list[records.Record] = []
  texts = [(path, text) for path in inputs for text in read_lines(path, limit=num_texts)]
  longest = max(len(pair.encode(text)) for _, text in texts)
  width = -(-longest // 8) * 8
  with Progress() as bar:
    task = bar.add_task("decoding", total=len(texts))
    for path in inputs:
      texts_of_path = [text for text_path, text in texts if text_path == path]
      for first in range(0, len(texts_of_path), every):
        interval = texts_of_path[first : first + every]
        frozen_outputs: list[DecodeResult] = []
        online_outputs: list[DecodeResult] = []
        for i, text in enumerate(interval, first):
          prompt, keys = pair.prompt([text], width), row_keys(seed, i, 1)
          params = Params(pair.target_params, (learned, target_params))
          decoded, learned = decode_and_learn(
            decoder, params, prompt, keys, max_new_tokens=max_new_tokens
          )
          decoded_frozen = decode_frozen(prompt, keys, max_new_tokens=max_new_tokens)
          frozen_outputs.append(jax.device_get(decoded_frozen))
          online_outputs.append(jax.device_get(decoded))
          bar.advance(task)
        (setting,) = settings_to_measure(pair, interval, [settings], [gamma])
        for suffix, outputs in (("", frozen_outputs), (", online", online_outputs)):
          measured.append(
            dataclasses.replace(
              setting,
              task=pathlib.Path(path).name,
              draft=pair.draft_name + suffix,
              num_tokens=num_tokens(outputs),
              rounds=num_rounds(outputs),
              tokens_per_round=num_tokens(outputs) / num_rounds(outputs),
            )
          )
  with records.open_results(output_dir) as path:
    for record in measured:
      records.append(path, record)
  console = Console(markup=False, soft_wrap=True)
  console.print(render(online_table(measured), "terminal"))
  console.print(f"Records: {results}")
