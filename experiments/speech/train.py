"""Train a draft head of a Whisper on its outputs (outputs.py):

python -m experiments.speech.train --data runs/speech/train --output experiments/speech/head

The head is a decoder layer of kind 'conditioned': it attends to the keys and values of the target's
last layer, reads the outputs of the target's last layers, and has the target's token embeddings, of
which the most frequent tokens have logits. Training minimizes the divergence from the target's
distribution at each token. An interrupted run resumes after its last epoch, with the same result.
"""

import argparse
import collections
import functools
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization, traverse_util
from jax import Array, lax

from experiments.lib import script
from experiments.speech import corpus, published
from experiments.speech.outputs import layers_of
from specdec_jax import load_pair
from specdec_jax.checkpoints.formats import TABLE
from specdec_jax.checkpoints.load import load_model
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.arrays import gather
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.types import AnyPair
from specdec_jax.drafts.heads import new_head
from specdec_jax.models.families import init_params
from specdec_jax.train.objectives import divergences

VALID = 32  # windows for validation, the last ones
STRIDE = 4  # mean number of tokens of a round


class Rows(NamedTuple):
  """Windows of a batch, whose inputs are the tokens of their prompts and texts.

  Attributes:
    hidden: states that predict the inputs; 0 for the first one.
    labels: most probable tokens after each input, by their place among the head's tokens.
    probs: probabilities of these tokens; 0 where there is no text.
  """

  inputs: Any  # [B, T]
  hidden: Any  # [B, T, E]
  labels: Any  # [B, T, k]
  probs: Any  # [B, T, k]
  starts: Any  # [B], place of the last token of the prompt
  cross: Any  # [B, 2, H, S, D]


def frequent(tokens: np.ndarray, texts: list[list[int]], special: list[int], count: int) -> list:
  """Return the `count` most frequent tokens of outputs and texts, with special ones."""
  counts = collections.Counter(tokens[tokens >= 0].tolist())
  for text in texts:
    counts.update(text)
  kept = dict.fromkeys(special)
  for token, _ in counts.most_common():
    if len(kept) == count:
      break
    kept.setdefault(token)
  return sorted(kept)


def rows_of(data: dict[str, np.ndarray], index: np.ndarray, place: np.ndarray) -> Rows:
  """Return windows as a batch; `place` has the place of each token among the head's, or -1."""
  index = np.sort(index)
  prompts, tokens = (data[name][index] for name in ("prompts", "tokens"))
  before, lengths = (prompts >= 0).sum(axis=1), (tokens >= 0).sum(axis=1)
  width = -(-int((before + lengths).max()) // 32) * 32
  size, top = len(index), data["top_tokens"].shape[2]
  inputs = np.zeros((size, width), np.int32)
  hidden = np.zeros((size, width, data["hidden"].shape[2]), np.float16)
  labels = np.zeros((size, width, top), np.int32)
  probs = np.zeros((size, width, top), np.float32)
  for row, i in enumerate(index):
    first, last = int(before[row]), int(lengths[row])
    inputs[row, : first + last - 1] = [*prompts[row, :first], *tokens[row, : last - 1]]
    hidden[row, 1:first] = data["prompt_hidden"][i, : first - 1]
    hidden[row, first : first + last] = data["hidden"][i, :last]
    text = slice(first - 1, first + last - 1)
    found = place[data["top_tokens"][i, :last]]
    labels[row, text] = np.maximum(found, 0)
    known = np.where(found >= 0, data["top_probs"][i, :last].astype(np.float32), 0)
    probs[row, text] = known / np.maximum(known.sum(axis=1, keepdims=True), 1e-6)
  return Rows(inputs, hidden, labels, probs, before - 1, data["cross"][index])


def batches(
  data: dict[str, np.ndarray], place: np.ndarray, windows: np.ndarray, size: int
) -> Iterator[Rows]:
  for start in range(0, len(windows) - size + 1, size):
    yield rows_of(data, windows[start : start + size], place)


def head_of(config: Any, num_tokens: int) -> Any:
  """Return a head of one layer for a target, with logits for `num_tokens` tokens."""
  return new_head(
    config,
    "conditioned",
    emb_dim=config.emb_dim,
    mlp_dim=config.mlp_dim,
    num_decoder_layers=1,
    layers=layers_of(config),
    table_tokens=num_tokens,
    **{name: getattr(config, name) for name in ("gated", "activation", "biases", "num_positions")},
  )


def train(
  pair: AnyPair,
  target_params: Any,
  folder: str,
  output: str,
  num_tokens: int,
  epochs: int,
  batch_size: int,
  rate: float,
  texts: list[str],
) -> None:
  """Train a head and save it; see the module docstring."""
  path = pathlib.Path(folder)
  names = "prompts", "tokens", "prompt_hidden", "hidden", "top_tokens", "top_probs", "cross"
  data = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in names}
  count, config = json.loads((path / "done.json").read_text()), pair.config
  words, speech = pair.vocabulary, pair.target.speech
  timestamps = range(speech.no_timestamps_id + 1, len(words))
  encoded = [words.encode_target(f" {text}") for text in texts]
  used = data["tokens"][:count]
  chosen = frequent(used, encoded, [words.eos_id, *timestamps], num_tokens)
  covered = np.isin(used[used >= 0], chosen).mean()
  print(
    f"{count} windows, {(used >= 0).sum()} tokens, {covered:.2%} of them the head's", flush=True
  )
  place = np.full(config.vocab_size, -1)
  place[chosen] = np.arange(len(chosen))
  head: Any = head_of(config.with_layout(kernels="xla"), len(chosen))
  params = _from_target(init_params(head, jax.random.key(0)), target_params, config)
  params["decoder"]["logits_dense"]["output_tokens"] = jnp.asarray(chosen, jnp.int32)
  own, fixed = _split(params)
  table = pair.target.params["token_embedder"]["embedding"]
  steps = (count - VALID) // batch_size
  schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 100, epochs * steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

  def logits_of(own: Any, table: Array, rows: Rows, anchors: Array) -> Array:
    whole = head.draft_params(config, _joined(own, fixed), {"token_embedder": {"embedding": table}})
    cross = tuple(rows.cross.astype(jnp.float32).swapaxes(0, 1))
    bias = jnp.zeros((len(anchors), 1, 1, rows.cross.shape[3]), jnp.float32)
    inputs = rows.inputs, rows.hidden.astype(jnp.float32), anchors, (cross,), bias
    return head.module.apply({"params": whole}, *inputs, method=_few_logits)

  def anchors_of(rows: Rows, is_anchor: Array) -> Array:
    positions = jnp.arange(rows.inputs.shape[1])[None]
    is_anchor |= positions <= rows.starts[:, None]
    return lax.cummax(jnp.where(is_anchor, positions, 0), axis=1)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(own, state, table, rows: Rows, rng):
    is_anchor = jax.random.bernoulli(rng, 1 / STRIDE, rows.inputs.shape)
    anchors = anchors_of(rows, is_anchor)

    def loss_of(own: Any) -> Array:
      logits = logits_of(own, table, rows, anchors)
      is_text = rows.probs.sum(axis=-1) > 0
      each = divergences(logits, rows.labels, rows.probs, "forward_kl")
      return (each * is_text).sum() / is_text.sum()

    loss, gradient = jax.value_and_grad(loss_of)(own)
    updates, state = optimizer.update(gradient, state, own)
    return optax.apply_updates(own, updates), state, loss

  @jax.jit
  def agreement(own, table, rows: Rows) -> tuple[Array, Array]:
    """Count texts' tokens that are the head's most probable, by offset from an anchor."""
    positions = jnp.arange(rows.inputs.shape[1])[None]
    anchors = anchors_of(rows, (positions - rows.starts[:, None]) % STRIDE == 0)
    same = logits_of(own, table, rows, anchors).argmax(axis=-1) == rows.labels[..., 0]
    is_text = rows.probs.sum(axis=-1) > 0
    of_offset = (positions - anchors)[..., None] == jnp.arange(STRIDE)
    of_offset &= is_text[..., None]
    return (of_offset & same[..., None]).sum(axis=(0, 1)), of_offset.sum(axis=(0, 1))

  state, done, saved = optimizer.init(own), 0, path / "state.msgpack"
  if saved.exists():
    own, state, done = serialization.from_bytes((own, state, 0), saved.read_bytes())
  for epoch in range(done, epochs):
    since, losses = time.time(), []
    order = np.random.default_rng(epoch).permutation(count - VALID)
    for i, rows in enumerate(batches(data, place, order, batch_size)):
      rng = jax.random.fold_in(jax.random.key(1), epoch * steps + i)
      own, state, loss = step(own, state, table, rows, rng)
      losses.append(float(loss))
      if i % 10 == 0:
        print(f"  {i} of {steps}: {np.mean(losses[-10:]):.3f}", flush=True)
    found = [
      agreement(own, table, x) for x in batches(data, place, np.arange(count - VALID, count), 8)
    ]
    same, total = (np.sum([each[k] for each in found], axis=0) for k in (0, 1))
    shares = " ".join(f"{share:.3f}" for share in same / total)
    print(
      f"epoch {epoch}: loss {np.mean(losses):.3f}, agreement {shares}, {time.time() - since:.0f} s"
    )
    with atomic_write(saved, "wb") as file:
      file.write(serialization.to_bytes((own, state, epoch + 1)))
    save_model(output, head, _joined(own, fixed), words.fingerprint(), jnp.bfloat16)


def _from_target(params: Any, target_params: Any, config: Any) -> Any:
  """Return the parameters of a head, with those of the target's last layer where they fit.

  Conditioning begins as small as the embeddings of tokens are.
  """
  own, other = (traverse_util.flatten_dict(tree, sep="/") for tree in (params, target_params))
  last, std = f"layers_{config.num_decoder_layers - 1}", other[TABLE].std()
  for name, x in own.items():
    taken = other.get(name.replace("layers_0", last))
    if taken is not None and taken.shape == x.shape:
      own[name] = taken
    elif name == "age" or name == "state/kernel":
      own[name] = std * x
  return traverse_util.unflatten_dict(own, sep="/")


def _few_logits(module: Any, inputs, hidden, anchors, cross, bias) -> Array:
  """Return the logits of the head's tokens, as `SharedEncoderT5.after_each` of all tokens."""
  x, embedding = module.token_embedder(inputs), module.token_embedder.embedding
  offsets = jnp.arange(inputs.shape[1])[None] - anchors
  x = x + module.condition(gather(hidden, anchors), offsets)
  states = module.decoder(x, embedding, cross, bias)[1]
  logits = module.decoder.logits_dense.variables["params"]
  return states @ logits["kernel"]


def _split(params: Any) -> tuple[Any, Any]:
  """Return the parameters that are trained, and the ids of the tokens that have logits."""
  decoder = {name: x for name, x in params["decoder"].items() if name != "logits_dense"}
  return {**params, "decoder": decoder}, params["decoder"]["logits_dense"]


def _joined(own: Any, logits: Any) -> Any:
  return {**own, "decoder": {**own["decoder"], "logits_dense": logits}}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--data", required=True, help="folder of outputs.py")
  parser.add_argument("--output", required=True, help="folder of the head")
  parser.add_argument("--texts", default="data", help="folder of texts, to count tokens")
  parser.add_argument("--tokens", type=int, default=7168, help="tokens that have logits")
  parser.add_argument("--epochs", type=int, default=8)
  parser.add_argument("--batch_size", type=int, default=8)
  parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
  args = parser.parse_args()
  pair = load_pair(str(published.folder("base")), kernels="xla")
  texts = corpus.sentences(args.texts)
  _, target_params = load_model(str(published.folder("base")))
  settings = args.tokens, args.epochs, args.batch_size, args.rate
  train(pair, target_params, args.data, args.output, *settings, texts)


if __name__ == "__main__":
  script.run(main)
