"""Checks of outputs that any engine wrote, given their tokens."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.core.arrays import gather_token
from specdec_jax.core.context import Prompt
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.generation_config import SETTINGS, GenerationConfig
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError, require_text, require_tokens
from specdec_jax.exactness.argmax import PAST_END, SHARES, Divergence, tokens_of
from specdec_jax.exactness.checker import MOST_LINES, Checker, Row, of_divergence, processors_of
from specdec_jax.exactness.processed import processed, target_distribution
from specdec_jax.exactness.texts import TextScores, score_texts
from specdec_jax.measure.alpha import teacher_forced_logits
from specdec_jax.pair import Pair


class Group(NamedTuple):
  """Outputs with the same settings: their numbers in the file, from 1, sources and tokens."""

  config: GenerationConfig
  numbers: list[int]
  texts: list[str]
  outputs: list[list[int]]

  def __str__(self) -> str:
    temperature = {"temperature": self.config.sampling().temperature}
    given = temperature | self.config.given() | temperature  # first in the text
    return ", ".join(f"{name} {x!s:.60}" for name, x in given.items() if name != "do_sample")


def groups_of(
  pair: Pair, texts: Sequence[str], records: Sequence[Mapping[str, Any]], given: Mapping[str, Any]
) -> list[Group]:
  """Return the outputs for texts that records have; `given` has settings that records may lack."""
  groups: dict[str, Group] = {}
  for number, (text, record) in enumerate(zip(texts, records), 1):
    config = GenerationConfig.merged(given, {k: x for k, x in record.items() if k in SETTINGS})
    tokens = record.get("decoded", record).get("tokens")
    if tokens is None and config.sampling().is_argmax and "output" in record:
      require_text(f"output {number}", record["output"])
      tokens = pair.vocabulary.encode_output(record["output"])[: config.max_new_tokens]
    if not isinstance(tokens, list):
      raise InputError(
        f"Output {number} has no list of 'tokens'. At temperature 0, 'output' may have its text; "
        "above, a text does not tell which tokens were sampled."
      )
    if tokens or pair.can_decode(text):  # the output of a blank text is empty
      require_tokens(f"output {number}", [tokens], pair.target.model.vocab_size)
      group = groups.setdefault(json.dumps(config.given(), default=str), Group(config, [], [], []))
      group.numbers.append(number)
      group.texts.append(text)
      group.outputs.append(tokens)
  return [*groups.values()]


class OutputsChecker(Checker):
  """Checks of outputs that exist. A setting is a `Group`, whose limit is its longest output."""

  def __init__(self, pair: Pair, batch_size: int):
    self.pair, self.batch_size = pair, batch_size
    self.processors = processors_of(pair, GenerationConfig())  # warns of those of the checkpoint

  def outputs(self, setting: Any) -> Row:
    """Compare each token of outputs at temperature 0 with the argmax after the tokens before."""
    scored, count = self.samples(setting, 0, 0), len(setting.outputs)
    found, lines = f"{count - len(scored.lines)} of {count}", scored.lines[:MOST_LINES]
    details = "texts have the tokens of argmax"
    return Row(not scored.num_impossible, "outputs", setting, found, "no tie", details, lines)

  def samples(self, setting: Any, num_tokens: int, seed: int) -> TextScores:
    """Score the tokens of outputs, as if each of them were emitted by a round."""
    (config, numbers, texts, outputs), size = setting, self.batch_size
    processors = self.pair.processors_of(config, config.eos_ids(self.pair.vocabulary.eos_id))
    rest, found = iter(zip(numbers, outputs)), list[tuple[int, Divergence]]()

    def decode(prompt, keys, *, max_new_tokens: int) -> DecodeResult:
      of_rows, rows = zip(*(next(rest, (0, [])) for _ in range(size)))
      tokens, lengths = padded(rows, max_new_tokens), np.array([*map(len, rows)])
      rounds = Rounds(*[jnp.ones(tokens.T.shape, jnp.int32)] * 4)
      result = DecodeResult(
        jnp.asarray(tokens), jnp.asarray(lengths), rounds, jnp.array(0), jnp.full(size, -1)
      )
      worst = self._impossible(config, prompt, tokens_of(result))
      found.extend((of_rows[divergence.row], divergence) for divergence in worst)
      return result

    settings = DecodeSettings(config.sampling(), size, max(map(len, outputs)))
    num_tokens = sum(map(len, outputs))
    scored = score_texts(self.pair, texts, decode, settings, num_tokens, processors=processors)
    found.sort(key=lambda each: each[1].is_tie)
    lines = [of_divergence(self.pair, *each) for each in found]
    return scored._replace(num_impossible=sum(not x.is_tie for _, x in found), lines=lines)

  def _impossible(
    self, config: GenerationConfig, prompt: Prompt, output: np.ndarray
  ) -> Iterator[Divergence]:
    """Yield the worst impossible token of each output [B, T] that has one; see `tokens_of`.

    A token is impossible if it is not the argmax, or if processors or filters exclude it. It is a
    tie if rounding can swap it with the possible token with the nearest logit. How the engine
    rounds is not known, so the bound is that of `SHARES`.
    """
    pair, tokens = self.pair, jnp.maximum(output, 0)
    eos_ids = config.eos_ids(pair.vocabulary.eos_id)
    logits = teacher_forced_logits(pair.target.model, pair.target.params, prompt, tokens)
    block = prompt, tokens, output.shape[1], logits
    logits = processed(pair.processors_of(config, eos_ids), pair.target.model, *block)
    moves = jnp.abs(logits - gather_token(logits, tokens)[..., None])
    moves = jnp.where(target_distribution(logits, config.sampling()) > 0, moves, jnp.inf)
    lowest = jnp.where(jnp.isfinite(logits), logits, jnp.inf).min(axis=-1)
    rounding = SHARES[pair.dtype] * np.asarray(logits.max(axis=-1) - lowest)
    is_eos, is_text = np.isin(output, eos_ids), output != PAST_END
    is_over = is_text & (np.cumsum(is_eos, axis=1) > is_eos)  # after the first EOS
    may_stop = bool(config.stops or config.max_length)  # without EOS, before the longest output
    is_cut = ~(is_text | is_eos.any(axis=1, keepdims=True) | may_stop) & is_text[:, :1]
    gap = np.where(is_over | is_cut, np.inf, np.where(is_text, moves.min(axis=-1), 0.0))
    possible = np.where(is_over, PAST_END, np.where(is_cut, eos_ids[0], moves.argmin(axis=-1)))
    for row, place in enumerate((gap / np.maximum(rounding, 1e-30)).argmax(axis=1).tolist()):
      if gap[row, place]:
        values: Any = (x[row, place].item() for x in (possible, output, gap, rounding))
        yield Divergence(row, place, *values)
