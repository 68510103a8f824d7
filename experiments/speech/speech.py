"""Speculative decoding of Whisper base, and its encoder and decoder in other programs:

pip install -e '.[speech,peers]' faster-whisper
python -m experiments.speech.speech --corpus runs/speech/corpus --draft experiments/speech/head

For each set of clips, all decoders run in turn, in one process or in idle subprocesses. A set that
`results.jsonl` has for these settings is not measured again.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import script
from experiments.lib.records import lines, measured_on
from experiments.peers.worker import Process, after_idle
from experiments.speech import corpus, published
from experiments.speech import peers as peers_module
from experiments.speech.peers import CTranslate2, FasterWhisper, Peer, Transformers
from specdec_jax import load_pair, theory
from specdec_jax.core.context import Encoded
from specdec_jax.core.counts import num_rounds, num_tokens, require_finite
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.vocabulary import padded
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.errors import InputError
from specdec_jax.measure.alpha import measure_alpha
from specdec_jax.measure.costs import Costs, measure_costs, ratio_range
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.records import results_path
from specdec_jax.measure.tables import MISSING, Table, number_text, terminal_text
from specdec_jax.models.whisper import WhisperModel
from specdec_jax.pair import Pair
from specdec_jax.speech.audio import log_mel, read_audio
from specdec_jax.speech.transcribe import Transcriber

OWN = "specdec_jax"
MAX_NEW_TOKENS = 224  # or half of the positions of the target
BATCH_SIZES, GAMMA = (1, 8), 3
HELD_OUT = "held out"  # is for drafts: the speed of other programs does not depend on voices
SETS = {"short": "test_short", "windows": "test", HELD_OUT: "test_held_out"}

Row = dict[str, Any]


class Settings(NamedTuple):
  """Settings of the measurement of a set of clips.

  Attributes:
    gammas: numbers of draft tokens per round; each is measured.
    repeats: number of timed decodes of each clip.
  """

  batch_sizes: Sequence[int] = BATCH_SIZES
  gammas: Sequence[int] = (GAMMA,)
  repeats: int = 2


def clips_of(folder: pathlib.Path, count: int) -> list[np.ndarray]:
  """Return the speech of the first windows of `corpus.make`, as samples in [-1, 1]."""
  windows = np.load(folder / "windows.npy", mmap_mode="r")
  ends = [round(line["seconds"] * corpus.RATE) for line in lines(folder / "windows.jsonl")]
  return [read_audio(window[:end]) for window, end in zip(windows[:count], ends)]


def recordings(folder: pathlib.Path) -> list[np.ndarray]:
  """Return the samples of `*.wav`, and of `*.raw` files of 16-bit samples without a header."""
  raw = [np.fromfile(path, "<i2") for path in sorted(folder.glob("*.raw"))]
  return [*map(read_audio, sorted(folder.glob("*.wav"))), *map(read_audio, raw)]


def interleaved(
  calls: Mapping[Any, Callable[[int], tuple[float, Any]]], count: int, repeats: int
) -> tuple[dict[Any, np.ndarray], dict[Any, list]]:
  """Time calls for each of `count` inputs in turn, and repeat that.

  Each call is first made once for the first input, to compile. Every second time the calls are made
  in reverse order.

  Args:
    calls: functions from the number of an input to the seconds and the result.

  Returns:
    Seconds [count, repeats] and results [count] of each call.
  """
  seconds = {name: np.zeros((count, repeats)) for name in calls}
  results: dict[Any, list] = {name: [None] * count for name in calls}
  for call in calls.values():
    call(0)
  for r in range(repeats):
    for i in range(count):
      for name in calls if (r + i) % 2 else reversed([*calls]):
        seconds[name][i, r], results[name][i] = calls[name](i)
  return seconds, results


class Study:
  """Target with several drafts, and other programs that have the same weights.

  Attributes:
    pairs: the target with each draft, by the name of the draft.
    peers: other programs, by name and draft.
    limit: maximum number of new tokens.
  """

  def __init__(self, pairs: Mapping[str, Pair], peers: Sequence[Peer], settings: Settings):
    self.pairs, self.settings = pairs, settings
    self.peers = {(peer.name, peer.draft): peer for peer in peers}
    self.target = next(iter(pairs.values()))
    self.limit = limit_of(self.target)
    self.tokens = self.target.target.speech.prompt("en", None, False)
    self._encode = jax.jit(WhisperModel.encode, static_argnums=0)
    self._processes: dict[str, Process] = {}
    self._costs: dict[tuple[str, int], Sequence[Costs]] = {}  # by draft and batch size

  def open(self, stack: contextlib.ExitStack) -> None:
    """Load the other programs in subprocesses, which `stack` closes."""
    for peer in self.peers.values():
      if peer.package not in self._processes:
        self._processes[peer.package] = stack.enter_context(Process())
      self._processes[peer.package].call(peers_module.load, peer)

  def _call(self, key: tuple[str, ...], function: Callable, *args: Any) -> Any:
    return self._processes[self.peers[key[0], key[1]].package].call(function, key, *args)

  def keys(self, name: str, count: int) -> list[tuple]:
    """Return (batch size, program, draft, gamma) of all rows of a set of `count` clips."""
    own = [(OWN, "none", 0), *((OWN, name, g) for name in self.pairs for g in self.settings.gammas)]
    others = [(peer.name, peer.draft, peer.gamma) for peer in self.peers_of(name).values()]
    found = [(size, *each) for size in self.settings.batch_sizes for each in [*own, *others]]
    return [
      key for key in found if key[0] <= count and (key[0] == 1 or self._is_batched(*key[1:3]))
    ]

  def peers_of(self, name: str) -> dict[tuple[str, str], Peer]:
    """Return the other programs that are measured on a set."""
    return {} if name == HELD_OUT else self.peers

  def _is_batched(self, program: str, draft: str) -> bool:
    return program == OWN or self.peers[program, draft].is_batched

  def decoder(self, pair: Pair, gamma: int, temperature: float = 0.0) -> Any:
    """Return the decoder of `transcribe`."""
    transcriber = Transcriber(
      pair, language="en", timestamps=False, gamma=gamma, temperature=temperature
    )
    return transcriber.decoder(False)

  def measure(self, name: str, clips: Sequence[np.ndarray]) -> Iterator[Row]:
    """Yield the rows of a set of clips."""
    num_mels, sizes = _config(self.target).num_mels, self.settings.batch_sizes
    log_mel(clips[0], num_mels, corpus.WINDOW)  # which caches its filters
    mel_s, mels = zip(*(after_idle(log_mel, x, num_mels, corpus.WINDOW) for x in clips))
    encoder_s, encoded = self._encoded(self.peers_of(name), clips, mels)
    seconds = np.array([len(clip) / corpus.RATE for clip in clips])
    alphas = self._alphas([encoded[i : i + max(sizes)] for i in range(0, len(clips), max(sizes))])
    for size in (size for size in sizes if size <= len(clips)):
      used = len(clips) // size * size
      common = dict(
        set=name,
        clips=used,
        speech_s=seconds[:used].sum(),
        batch_size=size,
        limit=self.limit,
        repeats=self.settings.repeats,
        **provenance(),
      )
      keys = [key[1:] for key in self.keys(name, len(clips)) if key[0] == size]
      for row in self._decoded(encoded[:used], size, keys, alphas):
        has_own = row["program"] == OWN and row["draft"] in encoder_s
        names = [row["program"], *[row["draft"]] * has_own]
        own = dict(
          mel_s=sum(mel_s[:used]), encoder_s=sum(encoder_s[each][:used].sum() for each in names)
        )
        yield {**common, **row, **own, "total_s": sum(own.values()) + row["decoder_s"]}
      if size == 1 and "faster-whisper" in encoder_s:
        total_s = encoder_s["faster-whisper"].sum()
        yield dict(common, program="faster-whisper", draft="none", gamma=0, total_s=total_s)

  def _encoded(
    self,
    peers: Mapping[tuple[str, str], Peer],
    clips: Sequence[np.ndarray],
    mels: Sequence[np.ndarray],
  ) -> tuple[dict[str, np.ndarray], list[dict[str, Encoded]]]:
    """Encode clips with each program.

    Returns:
      Seconds of each clip, by the name of a program, or of a draft with an encoder of its own; and
      for each clip the prompts, by the name of a draft.
    """

    def own(model: Any, params: Any) -> Callable[[int], tuple[float, Any]]:
      return lambda i: after_idle(self._encode, model, params, jnp.asarray(mels[i])[None])

    def other(key: tuple[str, str], peer: Peer) -> Callable[[int], tuple[float, Any]]:
      if peer.load is FasterWhisper:
        return lambda i: self._call(key, peers_module.transcribe, clips[i])
      return lambda i: self._call(
        key, peers_module.encode, i, np.ascontiguousarray(mels[i].T[None])
      )

    calls = {OWN: own(self.target.target.model, self.target.target.params)}
    for name, pair in self.pairs.items():
      if pair.draft.encoder is not None:
        calls[name] = own(pair.draft.encoder, pair.draft.params)
    for key, peer in peers.items():
      calls.setdefault(peer.name, other(key, peer))
    seconds, results = interleaved(calls, len(clips), 1)
    tokens, lengths = jnp.asarray(padded([self.tokens], 4)), jnp.array([len(self.tokens)])
    encoded = [
      {
        name: Encoded(source, tokens, lengths, results[name][i] if name in results else None)
        for name in self.pairs
      }
      for i, source in enumerate(results[OWN])
    ]
    return {name: each[:, 0] for name, each in seconds.items()}, encoded

  def _alphas(self, batches: Sequence[Sequence[dict[str, Encoded]]]) -> dict[str, Row]:
    """Return alpha at temperatures 0 and 1, by the name of the draft."""
    found: dict[str, Row] = {name: {} for name in self.pairs}
    prompts = {name: [_stacked(batch, name) for batch in batches] for name in self.pairs}
    for temperature, field in ((0.0, "alpha"), (1.0, "alpha_1")):
      decoder, outputs = self.decoder(self.target, 0, temperature), []
      for i, prompt in enumerate(next(iter(prompts.values()))):
        rng = row_keys(0, i * len(batches[0]), len(prompt))
        outputs.append(decoder.run(self.target.params, prompt, rng, max_new_tokens=self.limit))
      outputs = [require_finite(each) for each in jax.device_get(outputs)]
      for name, pair in self.pairs.items():
        alpha = measure_alpha(pair, prompts[name], outputs, Sampling(temperature))
        ends = {f"{field}_low": alpha.alpha_low, f"{field}_high": alpha.alpha_high}
        found[name] |= {field: alpha.alpha, **ends}
    return found

  def _costs_of(self, name: str, size: int, prompt: Any) -> Sequence[Costs]:
    """Return the costs of a draft with each gamma, which are measured once per batch size."""
    if (name, size) not in self._costs:
      trees = [chain(gamma) for gamma in self.settings.gammas]
      (self._costs[name, size],) = measure_costs(
        [self.pairs[name]], trees, prompt, Sampling(0.0), self.limit, repeats=5
      )
    return self._costs[name, size]

  def _decoded(
    self,
    encoded: Sequence[dict[str, Encoded]],
    size: int,
    keys: Sequence[tuple],
    alphas: Mapping[str, Row],
  ) -> Iterator[Row]:
    """Decode clips in batches, and yield rows without the fields of the encoder.

    Args:
      keys: (program, draft, gamma) of each row.
    """
    groups = [range(i, i + size) for i in range(0, len(encoded), size)]
    prompts = {
      name: [_stacked([encoded[i] for i in group], name) for group in groups] for name in self.pairs
    }

    def own(name: str, gamma: int) -> Callable[[int], tuple[float, Any]]:
      pair = self.target if name == "none" else self.pairs[name]
      given = [*prompts.values()][0] if name == "none" else prompts[name]
      run = functools.partial(self.decoder(pair, gamma).run, pair.params)
      rng = row_keys(0, 0, size)
      return lambda i: after_idle(run, given[i], rng, max_new_tokens=self.limit)

    def other(*key: str) -> Callable[[int], tuple[float, Any]]:
      return lambda i: self._call(key, peers_module.decode, groups[i])

    calls: dict[tuple, Callable[[int], tuple[float, Any]]] = {}
    for program, name, gamma in keys:
      if program == OWN:
        calls[program, name, gamma] = own(name, gamma)
      elif self.peers[program, name].load is not FasterWhisper:
        calls[program, name, gamma] = other(program, name)
    timed, results = interleaved(calls, len(groups), self.settings.repeats)
    seconds = {key: float(np.median(each, axis=1).sum()) for key, each in timed.items()}
    baseline, eos_id = (OWN, "none", 0), self.target.vocabulary.eos_id
    texts = {
      key: [text for x in each for text in _texts(x, eos_id)] for key, each in results.items()
    }
    for key in calls:
      program, name, gamma = key
      differing = 0
      for ours, theirs in zip(texts[baseline], texts[key], strict=True):
        if ours != theirs:
          differing += 1
          both = map(self.target.vocabulary.decode, (ours, theirs))
          print(f"{program}, draft {name}, batch {size}:", *map(repr, both), sep="\n  ")
      ratios = timed[baseline].sum(axis=0) / timed[key].sum(axis=0)
      low, high = ratio_range(seconds[baseline] / seconds[key], ratios)
      row = dict(
        program=program,
        draft=name,
        gamma=gamma,
        decoder_s=seconds[key],
        speedup=seconds[baseline] / seconds[key],
        speedup_low=low,
        speedup_high=high,
        num_tokens=sum(map(len, texts[key])),
        differing=differing,
      )
      if program == OWN:
        outputs = [require_finite(each) for each in jax.device_get(results[key])]
        row["tokens_per_round"] = num_tokens(outputs) / num_rounds(outputs)
      if program == OWN and gamma:
        costs = self._costs_of(name, size, prompts[name][0])[self.settings.gammas.index(gamma)]
        lengths = [np.asarray(each.lengths).tolist() for each in results[baseline]]
        row |= alphas[name]
        if costs.are_measured:
          row |= dict(
            c=costs.c,
            v=costs.v,
            step_ms=1e3 * costs.target_step,
            predicted=theory.text_improvement(
              row["alpha"], gamma, costs.c, costs.v, lengths, *costs.prefill_steps
            ),
          )
      yield row


def _stacked(clips: Sequence[dict[str, Encoded]], name: str) -> Any:
  """Return the prompts of clips for a draft as one batch (`Encoded`)."""
  return jax.tree.map(lambda *x: jnp.concatenate(x), *(clip[name] for clip in clips))


def _texts(result: Any, eos_id: int) -> list[list[int]]:
  """Return the tokens of each row of a result without EOS."""
  if isinstance(result, DecodeResult):
    result = [row[:n].tolist() for row, n in zip(np.asarray(result.tokens), result.lengths)]
  return [row[: row.index(eos_id)] if eos_id in row else row for row in result]


def _config(pair: Pair) -> Any:
  return pair.config


def limit_of(pair: Pair) -> int:
  return min(MAX_NEW_TOKENS, _config(pair).num_positions // 2)


def key_of(row: Mapping[str, Any]) -> tuple:
  """Return what identifies a row. Of equal rows, the last one counts."""
  return tuple(row[name] for name in ("set", "clips", "batch_size", "program", "draft", "gamma"))


def latest(rows: Sequence[Row]) -> list[Row]:
  return [*{key_of(row): row for row in rows}.values()]


def run(study: Study, sets: Mapping[str, Sequence[np.ndarray]], output: str) -> None:
  """Measure the sets that `results.jsonl` in a folder lacks, and print the tables of all."""
  results = results_path(output)
  with contextlib.ExitStack() as stack:
    opened = False
    for name, clips in sets.items():
      done = {key_of(row) for row in lines(results)}
      wanted = {(name, len(clips) // key[0] * key[0], *key) for key in study.keys(name, len(clips))}
      if wanted <= done:
        continue
      if not opened:
        study.open(stack)
        opened = True
      since, rows = time.perf_counter(), [*study.measure(name, clips)]
      print(f"{name}: {time.perf_counter() - since:.0f} s", flush=True)
      with results.open("a") as file:
        file.writelines(f"{json.dumps(row, default=float)}\n" for row in rows)
  for table in (speech_drafts_table, speech_programs_table):
    print(terminal_text(table(lines(results))))
  print(f"Records: {results}")


def _interval(row: Row, name: str) -> str:
  if row.get(name) is None:
    return MISSING
  low, high = row[f"{name}_low"], row[f"{name}_high"]
  return f"{row[name]:.2f}" + ("" if low is None else f" [{low:.2f},{high:.2f}]")


def _set(row: Row) -> tuple[str, str]:
  return f"{row['set']}, {row['clips']}", f"{row['speech_s']:.0f}"


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
  first = rows[0]
  times = f"medians of {first['repeats']} interleaved repeats"
  return (
    f"float32, threads: {first['threads']}, temperature 0, at most {first['limit']} new tokens, "
    f"{times if first['repeats'] > 1 else 'each clip decoded once'}. {measured_on(rows)}",
  )


def speech_drafts_table(rows: Sequence[Row]) -> Table:
  """Return a table of speculative decoding with each draft."""
  rows = latest(rows)
  baselines = {
    (row["set"], row["clips"], row["batch_size"]): row
    for row in rows
    if (row["program"], row["gamma"]) == (OWN, 0)
  }
  cells = []
  for row in rows:
    if row["program"] == OWN and row["gamma"]:
      total_s = baselines[row["set"], row["clips"], row["batch_size"]]["total_s"]
      cells.append(
        (
          *_set(row),
          f"{row['batch_size']}",
          row["draft"],
          f"{row['gamma']}",
          _interval(row, "alpha"),
          _interval(row, "alpha_1"),
          f"{row['tokens_per_round']:.2f}",
          number_text(row.get("c"), ".3f"),
          number_text(row.get("v"), ".2f"),
          number_text(row.get("predicted"), ".2f"),
          _interval(row, "speedup"),
          f"{total_s / row['total_s']:.2f}",
          f"{total_s / (row['mel_s'] + row['encoder_s']):.2f}",
          f"{row['differing']}",
        )
      )
  columns = (
    *("clips", "speech, s", "batch", "draft", "gamma", "alpha", "alpha, temperature 1"),
    *("tokens per round", "c", "v", "predicted", "decoder", "end to end", "at most", "differ"),
  )
  return Table("Speculative decoding of Whisper", columns, tuple(cells), _notes(rows))


def speech_programs_table(rows: Sequence[Row]) -> Table:
  """Return a table of the seconds of log-mel spectrograms, encoder and decoder by program."""
  rows = latest(rows)
  cells = tuple(
    (
      *_set(row),
      f"{row['batch_size']}",
      row["program"],
      f"{row['draft']}, {row['gamma']}" if row["gamma"] else row["draft"],
      number_text(row.get("mel_s"), ".2f"),
      number_text(row.get("encoder_s"), ".2f"),
      number_text(row.get("decoder_s"), ".2f"),
      f"{row['total_s']:.2f}",
      f"{row['speech_s'] / row['total_s']:.1f}",
      number_text(row.get("differing"), "d"),
    )
    for row in rows
  )
  columns = (
    *("clips", "speech, s", "batch", "program", "draft", "log-mel, s", "encoder, s"),
    *("decoder, s", "total, s", "times real time", "differ"),
  )
  return Table("Whisper in several programs", columns, cells, _notes(rows))


def own_pairs(target: str, drafts: Sequence[str], texts: str) -> dict[str, Pair]:
  """Return the target with prompt lookup, n-grams, and each draft in float and int8.

  Args:
    texts: file of transcripts, one per line, whose n-grams are counted.
  """
  first = load_pair(target, "prompt_lookup")
  ngrams = load_pair(target, functools.partial(backoff_ngrams, target_text=texts)).draft
  pairs = {"prompt lookup": first, "n-grams": first.with_draft(ngrams)}
  for path in drafts:
    for weights in ("stored", "int8"):
      pair = first.with_draft(load_pair(target, path, draft_weights=weights).draft)
      pairs[pair.draft.name] = pair
  return pairs


def published_peers(pair: Pair, folder: str, without: Sequence[str] = ()) -> list[Peer]:
  """Return the other programs whose packages are installed, and print which are not.

  Args:
    folder: published.folder('base').
    without: packages that are not used.
  """
  limit, other = limit_of(pair), f"{folder}-ctranslate2"
  prompt = pair.target.speech.prompt("en", None, False)
  found = [
    Peer(f"CTranslate2{suffix}", "ctranslate2", CTranslate2, dict(compute_type=kind, **common))
    for kind, suffix in (("float32", ""), ("int8", ", int8"))
    for common in [dict(folder=other, prompt=prompt, limit=limit)]
  ]
  found += transformers_peers(folder, limit)
  found.append(
    Peer("faster-whisper", "faster_whisper", FasterWhisper, dict(folder=other), "none", 0, False)
  )
  found = [peer for peer in found if peer.package not in without]
  for peer in found:
    if importlib.util.find_spec(peer.package) is None:
      print(f"{peer.name} is not measured: {peer.package} is not installed.")
  found = [peer for peer in found if importlib.util.find_spec(peer.package)]
  if any(peer.settings["folder"] == other for peer in found):
    peers_module.ctranslate2_folder("base", other)
  return found


def transformers_peers(folder: str, limit: int) -> list[Peer]:
  """Return transformers without a draft and with prompt lookup."""
  name, lookup = "transformers", GAMMA
  settings = dict(folder=folder, limit=limit)
  return [
    Peer(name, name, Transformers, settings),
    Peer(name, name, Transformers, dict(settings, lookup=lookup), "prompt lookup", lookup, False),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--corpus", default="runs/speech/corpus", help="folder of corpus.py")
  parser.add_argument("--recordings", default="../shared/data/speech", help="folder of recordings")
  parser.add_argument(
    "--draft", action="append", default=[], help="draft head, or a smaller Whisper; may be repeated"
  )
  parser.add_argument(
    "--minutes",
    type=int,
    default=8,
    help="minutes of synthetic speech: each is a window, one of a held-out voice and a short clip",
  )
  parser.add_argument("--gamma", action="append", type=int, help="may be repeated; 3 by default")
  parser.add_argument(
    "--without", action="append", default=[], help="package that is not measured; may be repeated"
  )
  parser.add_argument("--repeats", type=int, default=2)
  parser.add_argument("--output", default="runs/speech/study", help="folder to write")
  args = parser.parse_args()
  target = str(published.folder("base"))
  sets = {"recordings": recordings(pathlib.Path(args.recordings))}
  for name, folder in SETS.items():
    sets[name] = clips_of(pathlib.Path(args.corpus, folder), args.minutes)
  if not all(sets.values()):
    raise InputError(f"There are no recordings in {args.recordings}, or no windows.")
  texts = pathlib.Path(args.output, "texts.txt")
  texts.parent.mkdir(parents=True, exist_ok=True)
  read = lines(pathlib.Path(args.corpus, "train", "windows.jsonl"))
  texts.write_text("".join(f" {' '.join(window['texts'])}\n" for window in read))
  pairs = own_pairs(target, args.draft, str(texts))
  peers = published_peers(pairs["prompt lookup"], target, args.without)
  settings = Settings(gammas=args.gamma or [GAMMA], repeats=args.repeats)
  run(Study(pairs, peers, settings), sets, args.output)


if __name__ == "__main__":
  script.run(main)
