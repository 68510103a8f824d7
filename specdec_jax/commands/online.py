"""Serve texts with a draft that learns from them, beside the same one frozen."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
from rich.console import Console

from specdec_jax import records
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult, Params
from specdec_jax.counts import num_rounds, num_tokens
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.heads.stateless import SpeculatorDraft
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.measurement.measure import settings_to_measure
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.runs import online_table
from specdec_jax.training.online import OnlineDraft, decode_and_learn


def serve_and_learn(
  pair: Pair,
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
  """Decode files of texts in turn; print a table, and write a record for each draft and stretch.

  Args:
    pair: with a draft of `pairs.speculator`, and kernels='xla'.
    inputs: files, one domain after the other.
    output_dir: gets `results.jsonl`, which must not be there: what is learned cannot be resumed.
    num_texts: of each file.
    every: texts of a stretch, over which tokens a round are told.
    gamma: guesses a round.
    temperature: 0 is argmax.
    learning_rate: as in `training.online.OnlineDraft`.
    max_new_tokens: limit for each text.
    seed: of all sampling.

  Raises:
    InputError: the draft is another, or there are records already.
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
      f"{pair.draft_name} does not learn while it serves; give a trained speculator."
    )
  own, read = pair.draft_params
  draft = OnlineDraft(frozen, learning_rate)
  learned, plain = draft.initial_state(own), pair.decode_fn(sampling, gamma)
  decoder = Decoder(pair.target, draft, pair.verifier_for(sampling), pair.vocabulary.eos_id)
  found: list[records.Record] = []
  texts = [(path, text) for path in inputs for text in read_lines(path, limit=num_texts)]
  longest = max(len(pair.encode(text)) for _, text in texts)
  width = -(-longest // 8) * 8
  with Progress() as bar:
    task = bar.add_task("serving", total=len(texts))
    for path in inputs:
      of_path = [text for where, text in texts if where == path]
      for at in range(0, len(of_path), every):
        stretch = of_path[at : at + every]
        ways: tuple[list[DecodeResult], list[DecodeResult]] = [], []
        for i, text in enumerate(stretch):
          prompt, keys = pair.prompt([text], width), row_keys(seed, at + i, 1)
          params = Params(pair.target_params, (learned, read))
          decoded, learned = decode_and_learn(
            decoder, params, prompt, keys, max_new_tokens=max_new_tokens
          )
          ways[0].append(jax.device_get(plain(prompt, keys, max_new_tokens=max_new_tokens)))
          ways[1].append(jax.device_get(decoded))
          bar.advance(task)
        settings = [sampling], [gamma], 1, max_new_tokens, seed, 1.0
        (setting,) = settings_to_measure(pair, stretch, *settings)
        lengths = [num_tokens(way) / num_rounds(way) for way in ways]
        for name, way, length in zip(("", ", online"), ways, lengths):
          found.append(
            dataclasses.replace(
              setting,
              task=pathlib.Path(path).name,
              draft=pair.draft_name + name,
              num_tokens=num_tokens(way),
              rounds=num_rounds(way),
              tokens_per_round=length,
            )
          )
  with records.open_results(output_dir) as path:
    for record in found:
      records.append(path, record)
  console = Console(markup=False, soft_wrap=True)
  console.print(render(online_table(found), "terminal"))
  console.print(f"Records: {results}")
