"""Comparison of a draft that changes from text to text with a frozen copy of it.

`OnlineDraft` is trained while it serves (online speculative decoding; Liu et al., 2024).
Verification computes the target's distribution at each draft token up to the first rejected one.
After each round, the compiled decoding program also runs one optimizer step, which moves the draft
towards these distributions. Outputs keep the target's distribution, because the q of a draft token
is computed with the same parameters that the token was sampled with.
"""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int, Key
from rich.console import Console

from experiments.lib.records import measured_with
from specdec_jax.contrib.retrieval import Datastore, with_texts
from specdec_jax.core.context import Context
from specdec_jax.core.counts import num_rounds, num_tokens
from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain, require_chain
from specdec_jax.core.types import DecodeResult, Keys, Outcome, Params, Proposal, WrappedDraft
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.heads.base import Source
from specdec_jax.drafts.heads.stateless import SpeculatorDraft, source_of
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError
from specdec_jax.measure import records
from specdec_jax.measure.progress import Progress
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.tables import LENGTH, MISSING, Table, terminal_text
from specdec_jax.models.families import module_of
from specdec_jax.pair import Pair
from specdec_jax.train.batches import PADDING, Batch
from specdec_jax.train.objectives import teacher_forced

Decode = Callable[[Int[Array, "1 P"], Key[Array, " 1"]], DecodeResult]


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
  """Decode files with a frozen and an online version of a draft; print a table and write records.

  A record covers one version and up to `every` texts of a file. The online version learns from all
  files, in order.

  Args:
    pair: target and draft. Its `kernels` must be 'xla', and its draft must be a `load.speculator`.
    inputs: paths of text files, one file per domain and one text per line.
    output_dir: folder for `results.jsonl`. That file must not exist, because learning cannot be
      resumed.
    num_texts: maximum number of texts to decode from each file.
    every: maximum number of texts per record.
    gamma: number of draft tokens per round.
    temperature: sampling temperature; 0 is argmax.
    learning_rate: see `OnlineDraft`.
    max_new_tokens: maximum number of tokens of each output.
    seed: random seed of all sampling.

  Raises:
    InputError: the draft cannot learn, or `results.jsonl` exists.
  """
  settings = DecodeSettings(Sampling(temperature), max_new_tokens=max_new_tokens, seed=seed)
  comparison = _Comparison(pair, inputs, output_dir, num_texts, every, gamma, settings)
  frozen = pair.draft.build(settings.sampling, chain(gamma))
  if not isinstance(frozen, SpeculatorDraft):
    raise InputError(
      f"{pair.draft.name} does not learn while it decodes; give a trained speculator."
    )
  head_params, target_params = pair.draft.params
  draft = OnlineDraft(frozen, learning_rate)
  learned = draft.initial_state(head_params)
  verifier = pair.verifier_for(settings.sampling)
  decoder = Decoder(pair.target.model, draft, verifier, pair.vocabulary.eos_id)

  def decode(prompt: Int[Array, "1 P"], keys: Key[Array, " 1"]) -> DecodeResult:
    nonlocal learned
    params = Params(pair.target.params, (learned, target_params))
    result, learned = decode_and_learn(decoder, params, prompt, keys, max_new_tokens=max_new_tokens)
    return result

  comparison.run("online", decode)


def serve_and_distill(
  pair: Pair,
  inputs: Sequence[str],
  output_dir: str,
  num_texts: int = 200,
  every: int = 50,
  gamma: int = 5,
  temperature: float = 0.0,
  learning_rate: float = 0.001,
  texts_per_step: int = 8,
  only_rejected: bool = False,
  max_new_tokens: int = 64,
  seed: int = 0,
) -> None:
  """Decode files with a frozen draft model and one that is distilled online; print a table.

  After each text, once there are `texts_per_step` outputs, one optimizer step moves the draft model
  towards the target's distributions in the last ones (online speculative decoding; Liu et al.,
  2024). Other arguments and the records are those of `serve_and_learn`.

  Args:
    pair: target and draft. Its `kernels` must be 'xla', and its draft a model.
    texts_per_step: number of texts in the batch of an optimizer step.
    only_rejected: whether to learn only at the positions of rejected draft tokens.

  Raises:
    InputError: the draft is not a model, or `results.jsonl` exists.
  """
  settings = DecodeSettings(Sampling(temperature), max_new_tokens=max_new_tokens, seed=seed)
  comparison = _Comparison(pair, inputs, output_dir, num_texts, every, gamma, settings)
  draft = pair.draft.build(settings.sampling, chain(gamma))
  if not isinstance(draft, ModelDraft):
    raise InputError(f"{pair.draft.name} is not a draft model; give one.")
  decoder = pair.decoder(settings.sampling, chain(gamma))
  target_module, module = (module_of(each.model.config) for each in (pair.target, draft))
  optimizer = optax.adafactor(learning_rate)

  @jax.jit
  def step(learned: LearnedState, target_params: Any, batch: Batch) -> LearnedState:
    p = jax.nn.softmax(teacher_forced(target_module, target_params, batch))

    def loss(params: Any) -> Array:
      cross_entropy = -(p * jax.nn.log_softmax(teacher_forced(module, params, batch))).sum(axis=-1)
      weights = batch.weights[..., 0]
      return (cross_entropy * weights).sum() / jnp.maximum(weights.sum(), 1)

    updates, opt_state = optimizer.update(
      jax.grad(loss)(learned.params), learned.opt_state, learned.params
    )
    return LearnedState(optax.apply_updates(learned.params, updates), opt_state)

  learned = LearnedState(pair.draft.params, optimizer.init(pair.draft.params))
  served: collections.deque[Batch] = collections.deque(maxlen=texts_per_step)

  def decode(prompt: Int[Array, "1 P"], keys: Key[Array, " 1"]) -> DecodeResult:
    nonlocal learned
    params = Params(pair.target.params, learned.params)
    result = jax.device_get(decoder.run(params, prompt, keys, max_new_tokens=max_new_tokens))
    is_learned = _is_rejected(result, gamma) if only_rejected else True
    served.append(_distillation_batch(prompt, result, is_learned, pair.vocabulary.pad_id))
    if len(served) == texts_per_step:  # all steps have one shape
      batch = jax.tree.map(lambda *rows: np.concatenate(rows), *served)
      learned = step(learned, pair.target.params, batch)
    return result

  comparison.run("distilled where rejected" if only_rejected else "distilled", decode)


def _is_rejected(result: DecodeResult, gamma: int) -> np.ndarray:
  """Return whether a draft token was rejected at each position of a text, [1, T]."""
  is_rejected = np.zeros(result.tokens.shape, bool)
  rounds, length = result.rounds, 0
  for accepted, emitted in zip(rounds.num_accepted[:, 0], rounds.num_emitted[:, 0]):
    if accepted < gamma and emitted == accepted + 1:
      is_rejected[0, length + accepted] = True
    length += emitted
  return is_rejected


def _distillation_batch(
  prompt: Array, result: DecodeResult, is_learned: np.ndarray | bool, pad_id: int
) -> Batch:
  """Return a text, with weight 1 where the draft learns and 0 elsewhere."""
  source = np.where(prompt == pad_id, PADDING, prompt)
  is_token = np.arange(result.tokens.shape[1]) < result.lengths[:, None]
  targets = np.where(is_token, result.tokens, PADDING)[..., None]
  return Batch(source, targets[..., 0], targets, (is_token & is_learned)[..., None])


def serve_and_store(
  pair: Pair,
  inputs: Sequence[str],
  output_dir: str,
  num_texts: int = 200,
  every: int = 50,
  gamma: int = 16,
  temperature: float = 0.0,
  max_new_tokens: int = 64,
  seed: int = 0,
) -> None:
  """Decode files with a frozen and a growing datastore; print a table and write records.

  The growing datastore starts as the frozen one. Each output is added to it before the next text is
  decoded (SuffixDecoding). A record covers one datastore and up to `every` texts of a file.

  Args:
    pair: target and draft. The draft must retrieve from a `Datastore`, which has room for more
      texts.
    inputs: paths of text files, one text per line.
    output_dir: folder for `results.jsonl`. That file must not exist.
    num_texts: maximum number of texts to decode from each file.
    every: maximum number of texts per record.
    gamma: maximum number of draft tokens per round.
    temperature: sampling temperature; 0 is argmax.
    max_new_tokens: maximum number of tokens of each output.
    seed: random seed of all sampling.

  Raises:
    InputError: the draft has no datastore, or `results.jsonl` exists.
  """
  settings = DecodeSettings(Sampling(temperature), max_new_tokens=max_new_tokens, seed=seed)
  comparison = _Comparison(pair, inputs, output_dir, num_texts, every, gamma, settings)
  store, start_id = pair.draft.params, pair.vocabulary.start_id
  if not isinstance(store, Datastore):
    raise InputError(f"{pair.draft.name} has no datastore; give a draft that retrieves.")
  decoder = pair.decoder(settings.sampling, chain(gamma))

  def decode(prompt: Int[Array, "1 P"], keys: Key[Array, " 1"]) -> DecodeResult:
    nonlocal store
    params = Params(pair.target.params, store)
    result = jax.device_get(decoder.run(params, prompt, keys, max_new_tokens=max_new_tokens))
    store = with_texts(store, [result.tokens[0, : result.lengths[0]].tolist()], start_id)
    return result

  comparison.run("growing", decode)


@dataclasses.dataclass(frozen=True)
class _Comparison:
  """Comparison of the draft of a pair with a version of it that changes from text to text.

  Attributes:
    pair: target and draft.
    inputs: paths of text files, one text per line.
    output_dir: folder for `results.jsonl`.
    num_texts: maximum number of texts to decode from each file.
    every: maximum number of texts per record.
    gamma: number of draft tokens per round.
    settings: settings of decoding.

  Raises:
    InputError: `results.jsonl` exists.
  """

  pair: Pair
  inputs: Sequence[str]
  output_dir: str
  num_texts: int
  every: int
  gamma: int
  settings: DecodeSettings

  def __post_init__(self):
    if self._results.exists():
      raise InputError(f"{self._results} is there already; delete it, or give another output_dir.")

  @property
  def _results(self) -> pathlib.Path:
    return pathlib.Path(self.output_dir) / "results.jsonl"

  def run(self, version: str, decode: Decode) -> None:
    """Decode the texts in order, print a table and write records.

    Args:
      version: name of the version that changes.
      decode: function that decodes one text with that version, and then changes it.
    """
    pair, settings, every = self.pair, self.settings, self.every
    decode_frozen = pair.decode_fn(settings.sampling, chain(self.gamma))
    texts = {path: read_lines(path, limit=self.num_texts) for path in self.inputs}
    longest = max(len(pair.encode(text)) for lines in texts.values() for text in lines)
    width = -(-longest // 8) * 8
    measured: list[records.Record] = []
    with Progress() as bar:
      task = bar.add_task("decoding", total=sum(map(len, texts.values())))
      for path, lines in texts.items():
        for first in range(0, len(lines), every):
          interval = lines[first : first + every]
          frozen_outputs: list[DecodeResult] = []
          outputs: list[DecodeResult] = []
          for i, text in enumerate(interval, first):
            prompt, keys = pair.prompt([text], width), row_keys(settings.seed, i, 1)
            outputs.append(jax.device_get(decode(prompt, keys)))
            frozen = decode_frozen(prompt, keys, max_new_tokens=settings.max_new_tokens)
            frozen_outputs.append(jax.device_get(frozen))
            bar.advance(task)
          (setting,) = settings_to_measure(pair, interval, [settings], [self.gamma])
          for suffix, of_version in (("", frozen_outputs), (f", {version}", outputs)):
            measured.append(
              setting.replace(
                task=pathlib.Path(path).name,
                draft=pair.draft.name + suffix,
                num_tokens=num_tokens(of_version),
                rounds=num_rounds(of_version),
                tokens_per_round=num_tokens(of_version) / num_rounds(of_version),
              )
            )
    path = records.results_path(self.output_dir)
    for record in measured:
      records.append(path, record)
    console = Console(markup=False, soft_wrap=True)
    console.print(terminal_text(online_table(measured)))
    console.print(f"Records: {self._results}")


def online_table(measured: Sequence[Record]) -> Table:
  """Return a table of the acceptance lengths of a frozen draft and of a version that changes.

  Args:
    measured: records in the order of the texts. Each record of the frozen draft is followed by the
      record of the other version on the same texts.
  """
  rows, num_texts = [], collections.Counter[str | None]()
  for frozen, changing in zip(measured[::2], measured[1::2], strict=True):
    task, lengths = frozen.settings.task, (LENGTH.cell(r) for r in (frozen, changing))
    first_text = num_texts[task] + 1
    num_texts[task] += frozen.settings.num_examples or 0
    rows.append((task or MISSING, f"{first_text} to {num_texts[task]}", *lengths))
  first = measured[0]
  version = measured[1].models.draft.removeprefix(f"{first.models.draft}, ")
  notes = (
    "Tokens per target forward pass; texts in the order in which they were served.",
    measured_with(measured),
  )
  models = f"{first.models.target}, {first.models.draft}"
  title = f"{models}, gamma {first.settings.gamma}: frozen and {version}"
  return Table(title, ("task", "texts", "frozen", version), tuple(rows), notes)


class LearnedState(NamedTuple):
  """State of an online draft that is carried from one batch of texts to the next.

  Attributes:
    params: current parameters of the draft head or model.
    opt_state: state of the optimizer.
  """

  params: Any
  opt_state: Any


class OnlineState(NamedTuple):
  """State of an `OnlineDraft` within a batch of texts.

  Attributes:
    learned: state that is carried from one batch to the next.
    source: cross-attention keys and values of the target's last layer, and their bias; (None, None)
      if the target has no encoder.
    hidden: the target's hidden state from which this round was drafted.
    last_token: last committed token before this round.
  """

  learned: LearnedState
  source: Source
  hidden: Float[Array, "B E"]
  last_token: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class OnlineDraft(WrappedDraft):
  """A draft that proposes chains with a learned head, and trains it on the outcome of each round.

  Its parameters are a pair: the `LearnedState`, and the target's parameters that the head uses. All
  rows of a batch train the same parameters, so their samples are not independent, but each row
  keeps the target's distribution.

  Attributes:
    draft: draft that proposes with the head.
    learning_rate: learning rate of Adafactor, which is the size of an update relative to the
      parameter.

  Raises:
    InputError: the tree is not a chain, or the head uses kernels that have no gradient.
  """

  draft: SpeculatorDraft
  learning_rate: float = 0.003
  depends_on_outcomes = True

  def __post_init__(self):
    require_chain("a draft that learns", self.draft.tree)
    if self.draft.head.layout.kernels != "xla":
      raise InputError(
        "A draft that learns needs kernels='xla', since `kernels.skinny` has no gradient."
      )

  def initial_state(self, params: Any) -> LearnedState:
    """Return the state before the first batch, from the initial parameters of the head."""
    return LearnedState(params, self._optimizer.init(params))

  def init(self, params: Any, context: Context, hidden: Array) -> OnlineState:
    learned, _ = params
    source = source_of(self.draft.head, context)
    return OnlineState(learned, source, context.hidden, context.last_token)

  def propose(
    self, params: Any, state: OnlineState, context: Context, rng: Array
  ) -> tuple[Proposal, OnlineState]:
    _, target_params = params
    proposal, _ = self.draft.propose((state.learned.params, target_params), (), context, rng)
    return proposal, state._replace(hidden=context.hidden, last_token=context.last_token)

  def observe(self, params: Any, state: OnlineState, outcome: Outcome) -> OnlineState:
    _, target_params = params
    draft_tokens, gamma = outcome.proposal.tokens, self.tree.depth
    previous = jnp.concatenate([state.last_token[:, None], draft_tokens[:, :-1]], axis=1)
    p = jax.nn.softmax(outcome.logits[:, :gamma].astype(jnp.float32))
    # Train on the verified draft tokens of rows that are not done: the accepted ones and the first
    # rejected one.
    is_verified = jnp.arange(gamma) <= outcome.verification.num_accepted[:, None]
    weight = is_verified & (outcome.num_emitted > 0)[:, None]
    module, target_module = self.draft.head.module, module_of(self.draft.target)

    def project(hidden: Array) -> Array:
      return target_module.apply({"params": target_params}, hidden, method="logits")

    def loss(head_params) -> Array:
      logits = module.apply({"params": head_params}, state.hidden, previous, state.source, project)
      cross_entropy = -(p * jax.nn.log_softmax(logits.astype(jnp.float32))).sum(axis=-1)
      return (cross_entropy * weight).sum() / jnp.maximum(weight.sum(), 1)

    head_params, opt_state = state.learned
    updates, opt_state = self._optimizer.update(jax.grad(loss)(head_params), opt_state, head_params)
    return state._replace(
      learned=LearnedState(optax.apply_updates(head_params, updates), opt_state)
    )

  @property
  def _optimizer(self) -> optax.GradientTransformation:
    return optax.adafactor(self.learning_rate)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def decode_and_learn(
  decoder: Decoder,
  params: Params,
  prompt: Int[Array, "B P"],
  rng: Keys,
  *,
  max_new_tokens: int,
) -> tuple[DecodeResult, LearnedState]:
  """Decode a batch like `Decoder.run`; also return the `LearnedState` after the batch."""
  state = decoder.init(params, prompt, rng, max_new_tokens)
  state = decoder.run_rounds(params, state)
  return decoder.result(state), state.draft_state.learned
