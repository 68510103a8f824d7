"""Test T5: one block, several steps and one teacher-forced pass agree, and sizes are as published.

The reference for the arithmetic is the T5 in numpy below, in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import traverse_util
from flax.serialization import msgpack_restore
from scipy import special

from specdec_jax.core import trees
from specdec_jax.core.trees import Tree, branching
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import for_decoding, init_params
from specdec_jax.models.kernels import gpu as kernels
from specdec_jax.models.layers import RelativePositionBias
from specdec_jax.models.layout import Layout
from specdec_jax.models.sizes import t5_config
from specdec_jax.models.t5 import T5Model

CONFIG = tiny.config(vocab_size=24, emb_dim=32, head_dim=12)
VARIANTS = {
  "1.1": CONFIG,
  "1.0": tiny.config(vocab_size=24, gated=False, activation="relu", tied_logits=True),
  "padded": tiny.config(vocab_size=21, padded_vocab_size=32),
  "padded and tied": tiny.config(vocab_size=21, padded_vocab_size=32, tied_logits=True),
  "UL2": tiny.config(vocab_size=24, activation="silu"),
  "umT5": tiny.config(vocab_size=24, bias_per_layer=True),
  "BART": tiny.config(**tiny.BART, vocab_size=24),
  "M2M100": tiny.config(
    **tiny.BART
    | dict(norm_position="before", has_final_norm=True, embedding_norm=False, activation="relu"),
    vocab_size=24,
    encoder_sizes=(16, 4, 4, 4, 24),
  ),
  "T5Gemma": tiny.config(**tiny.T5GEMMA, vocab_size=24),
}
LENGTH = 14  # tokens of text, the start token included
SLOTS = 24
# Logits have a size of 3, up to 10. float32 sums in another order differ by up to 4e-6; bfloat16
# may differ by 1e-2 of their size; one slot too many or too few changes them by up to 4.
TOLERANCE = {jnp.float32: dict(rtol=1e-5, atol=2e-5), jnp.bfloat16: dict(rtol=0.05, atol=0.25)}


def text(cfg, batch=4, seed=0):
  tokens = np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, LENGTH))
  tokens[:, 0] = 0
  return tokens.astype(np.int32)


def take(rows, start, count):
  """Gather [B, count, ...]: `count` entries of rows [B, T, ...] from each row's own start [B]."""
  return np.stack([row[at : at + count] for row, at in zip(rows, start, strict=True)])


class Cached:
  """A model with its parameters and jitted functions."""

  def __init__(self, cfg, params):
    model = T5Model(cfg)
    prefill = jax.jit(model.prefill, static_argnums=2)
    extend = jax.jit(model.extend, static_argnums=(3, 4))
    self.prefill = lambda source, slots=SLOTS: prefill(params, source, slots)[1]
    self.extend = functools.partial(extend, params)
    self.commit = model.commit

  def read(self, cache, tokens):
    """Return the logits of a block, and the cache after it is committed as a whole."""
    logits, _, cache = self.extend(cache, tokens)
    return logits, self.commit(cache, cache.length + tokens.shape[1])


@functools.cache
def setting(dtype):
  """Return model, source, tokens, teacher-forced logits and tolerance in one dtype."""
  cfg = tiny.config(vocab_size=24, emb_dim=32, head_dim=12, layout=Layout(dtype=dtype))
  params, source, tokens = tiny.params(cfg, 0), tiny.sources(cfg, 0, 4), text(cfg)
  logits = np.asarray(tiny.teacher_forced(cfg)(params, source, tokens))
  assert logits.dtype == np.float32 and logits.shape == (4, LENGTH, 24)
  return Cached(cfg, params), source, tokens, logits, TOLERANCE[dtype]


BOTH = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


@BOTH
def test_steps_equal_the_teacher_forced_pass(dtype):
  model, source, tokens, logits, tolerance = setting(dtype)
  cache = model.prefill(source)
  for i in range(LENGTH):
    np.testing.assert_array_equal(cache.length, i)
    got, cache = model.read(cache, tokens[:, i : i + 1])
    np.testing.assert_allclose(got[:, 0], logits[:, i], **tolerance)


@BOTH
@pytest.mark.parametrize("cuts", [[14], [1, 13], [4, 4, 4, 2]], ids=str)
def test_blocks_equal_the_teacher_forced_pass(dtype, cuts):
  model, source, tokens, logits, tolerance = setting(dtype)
  cache, at = model.prefill(source), 0
  for block in cuts:
    got, cache = model.read(cache, tokens[:, at : at + block])
    np.testing.assert_allclose(got, logits[:, at : at + block], **tolerance)
    at += block


@BOTH
@pytest.mark.parametrize("block", [1, 2, 5])
def test_blocks_at_ragged_offsets_equal_the_teacher_forced_pass(dtype, block):
  model, source, tokens, logits, tolerance = setting(dtype)
  offsets = np.asarray([0, 3, 9, 6])
  _, cache = model.read(model.prefill(source), tokens)  # past `offsets`: the text,
  _, cache = model.read(cache, tokens[:, ::-1][:, :5])  # past the text: other tokens
  cache = model.commit(cache, jnp.asarray(offsets))
  got, _, cache = model.extend(cache, take(tokens, offsets, block))
  np.testing.assert_allclose(got, take(logits, offsets, block), **tolerance)
  np.testing.assert_array_equal(cache.length, offsets)


@BOTH
@pytest.mark.parametrize("gamma", [1, 4])
def test_every_number_of_accepted_tokens_is_rolled_back(dtype, gamma):
  """Verify [last token, draft tokens], commit n of them, and continue as the loop does; n differs
  between rows."""
  model, source, tokens, logits, tolerance = setting(dtype)
  start = np.asarray([1, 4, 2, 3])
  _, filled = model.read(model.prefill(source), tokens[:, :5])
  filled = model.commit(filled, jnp.asarray(start))
  for first in range(gamma + 1):
    n = (first + np.arange(4)) % (gamma + 1)  # over the loop, each row has each n
    block = take(tokens, start, gamma + 1)
    wrong = np.arange(gamma + 1) > n[:, None]
    block = np.where(wrong, (block + 7) % 24, block)
    verified, _, cache = model.extend(filled, block)
    np.testing.assert_array_equal(cache.length, start)
    for row in range(4):  # the block equals the text up to the first wrong draft token
      np.testing.assert_allclose(
        verified[row, : n[row] + 1], logits[row, start[row] :][: n[row] + 1], **tolerance
      )
    kept = start + n + 1
    cache = model.commit(cache, jnp.asarray(kept))
    np.testing.assert_array_equal(cache.length, kept)
    again, _ = model.read(cache, take(tokens, kept, gamma + 1))
    np.testing.assert_allclose(again, take(logits, kept, gamma + 1), **tolerance)


def test_rolled_back_cache_equals_a_fresh_one():
  """The caches are bit-identical: masked slots are neither read nor added to their new content."""
  model, source, tokens, _, _ = setting(jnp.float32)
  _, fresh = model.read(model.prefill(source), tokens[:, :6])
  used = fresh
  for _ in range(3):
    _, used = model.read(used, tokens[:, ::-1][:, :5])
  used = model.commit(used, fresh.length)
  poisoned = fresh.replace(
    layers=jax.tree.map(lambda slots: slots.at[:, :, 6:].set(1e3), fresh.layers)
  )
  want, _ = model.read(fresh, tokens[:, 6:11])
  for cache in (used, poisoned):
    got, _ = model.read(cache, tokens[:, 6:11])
    np.testing.assert_array_equal(got, want)


def test_row_does_not_depend_on_its_neighbors():
  model, source, tokens, _, _ = setting(jnp.float32)
  _, cache = model.read(model.prefill(source), tokens[:, :6])
  cache = model.commit(cache, jnp.asarray([5, 2, 6, 1]))
  want, _ = model.read(cache, tokens[:, 6:9])
  others = tokens.copy()
  others[1:] = (others[1:] + 5) % 24
  got, _ = model.read(model.commit(cache, jnp.asarray([5, 6, 0, 3])), others[:, 6:9])
  np.testing.assert_array_equal(got[0], want[0])


def test_logits_depend_on_earlier_tokens_only():
  model, source, tokens, _, _ = setting(jnp.float32)
  changed = tokens.copy()
  changed[:, 8:] = (changed[:, 8:] + 3) % 24
  want, _ = model.read(model.prefill(source), tokens)
  got, _ = model.read(model.prefill(source), changed)
  np.testing.assert_array_equal(got[:, :8], want[:, :8])
  assert (np.abs(got - want)[:, 8:].max(axis=-1) > 0.1).all()


def test_unused_slots_do_not_change_the_logits():
  model, source, tokens, logits, tolerance = setting(jnp.float32)
  got, _ = model.read(model.prefill(source, 2 * SLOTS), tokens)
  np.testing.assert_allclose(got, logits, **tolerance)


def test_padding_of_the_source_is_not_attended_to():
  model, source, tokens, logits, tolerance = setting(jnp.float32)
  longer = np.pad(source, ((0, 0), (0, 9)))
  got, _ = model.read(model.prefill(longer), tokens)
  np.testing.assert_allclose(got, logits, **tolerance)
  other = np.where(source == 0, 0, (source + 1) % 22 + 2)  # but the source is
  got, _ = model.read(model.prefill(other), tokens)
  assert np.abs(got - logits).max() > 1


def test_source_of_padding_only_has_finite_logits():
  model, source, tokens, _, _ = setting(jnp.float32)
  got, _ = model.read(model.prefill(np.zeros_like(source)), tokens)
  assert np.isfinite(got).all()


def test_text_starts_with_the_padding_token():
  tokens, length = T5Model(CONFIG).prompt_tokens(jnp.ones((3, 5), jnp.int32))
  np.testing.assert_array_equal(tokens, [[0], [0], [0]])
  np.testing.assert_array_equal(length, [1, 1, 1])


# Trees.

TREES = {"full": branching(2, 2), "uneven": Tree((0, 0, 1, 1, 1, 2, 5, 6))}
ENDS = [-1, 2, 0, 4]  # the last accepted node of each of four rows, at different depths


def sees_its_cousins(sound, tree, length, nodes, num_slots):
  """Let nodes attend to all nodes with smaller numbers, as in a chain."""
  own_slots = length[:, None] + jnp.arange(tree.num_nodes)[nodes]
  visible = jnp.arange(num_slots) <= own_slots[..., None]
  return sound(tree, length, nodes, num_slots)._replace(visible=visible)


def stands_at_its_slot(sound, tree, length, nodes, num_slots):
  positions = length[:, None] + jnp.arange(tree.num_nodes)[nodes]
  key_positions = jnp.arange(num_slots)
  placement = sound(tree, length, nodes, num_slots)
  return placement._replace(positions=positions, key_positions=key_positions)


def is_taken_for_the_first(sound, tree, length, nodes, num_slots):
  """Place the nodes of a level as if the level were the first."""
  return sound(tree, length, slice(0, nodes.stop - nodes.start), num_slots)


ONCE, LEVELS = {"at once", "at once, then on"}, {"by levels", "by levels, then on"}
TREE_FAULTS = {  # and what each of them changes
  sees_its_cousins: ONCE | LEVELS,
  stands_at_its_slot: ONCE | LEVELS,
  is_taken_for_the_first: LEVELS,
}
WRONG_PATHS = [
  lambda path: None,
  lambda path: path[:, ::-1],
]  # not moved, or reversed


def off_paths(model, cache, tree, path=lambda path: path):
  """Return the differences between a tree and its paths, which are evaluated as chains from the
  same cache.

  The relative differences are those of logits and hidden states, for the tree in one pass and level
  by level, and for a chain that continues after one path per row is committed by `path`.
  """

  def size(x):
    return float(np.abs(x).max())

  def off(got, want):
    return max(size(x - y) / size(y) for x, y in zip(got, want))

  tokens = np.random.default_rng(2).integers(0, 24, (4, tree.num_nodes)).astype(np.int32)
  more = tokens[:, ::-1][:, : tree.depth + 1]

  # Each node ends a chain, which is followed by node 0; it must not attend to that.
  lineages = [np.flatnonzero(of_node) for of_node in tree.ancestors]
  lineages = np.stack([np.pad(nodes, (0, tree.depth + 1 - len(nodes))) for nodes in lineages])
  chains = [model.extend(cache, tokens[:, nodes])[:2] for nodes in lineages]
  of_nodes = [[x[:, at] for x in chain] for chain, at in zip(chains, tree.depths)]
  of_nodes = [np.stack(x, axis=1) for x in zip(*of_nodes)]
  length = cache.length + 1 + tree.depths[ENDS]
  chain = model.extend(cache, np.take_along_axis(tokens, lineages[ENDS], axis=1))[2]
  after = model.extend(model.commit(chain, length), more)[:2]

  found = {}
  for how, levels in ("at once", [(0, tree.num_nodes)]), ("by levels", [(0, 1), *tree.levels]):
    read, held = [], cache
    for first, last in levels:
      *of_level, held = model.extend(held, tokens[:, first:last], tree, first)
      read.append(of_level)
    np.testing.assert_array_equal(held.length, cache.length)
    found[how] = off([np.concatenate(x, axis=1) for x in zip(*read)], of_nodes)
    held = model.commit(held, length, tree, path(jnp.asarray(lineages[ENDS][:, 1:])))
    np.testing.assert_array_equal(held.length, length)
    found[f"{how}, then on"] = off(model.extend(held, more)[:2], after)
  return found


def far_off(found):
  """Return which differences are much larger than rounding errors, which are below 1e-6."""
  return {how for how, off in found.items() if off > 0.01}


def in_trees():
  """Return a model, and a cache with rows of different lengths and old tokens in unused slots."""
  cfg = tiny.config(vocab_size=24)
  model = Cached(cfg, tiny.params(cfg, 0))
  _, cache = model.read(model.prefill(tiny.sources(cfg, 0, 4)), text(cfg))
  return model, model.commit(cache, jnp.asarray([0, 9, 3, 6]))


@pytest.mark.parametrize("tree", TREES)
def test_tree_has_the_logits_of_its_paths(tree):
  model, cache = in_trees()
  found = off_paths(model, cache, TREES[tree])
  assert max(found.values()) < 1e-5
  for path in WRONG_PATHS:
    found = off_paths(model, cache, TREES[tree], path)
    assert far_off(found) == {"at once, then on", "by levels, then on"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_wrong_attention_in_a_tree_is_detected(monkeypatch, fault):
  monkeypatch.setattr(trees, "_place_tree", functools.partial(fault, trees._place_tree))
  assert far_off(off_paths(*in_trees(), TREES["full"])) == TREE_FAULTS[fault]


# Kernels for GPUs.


@pytest.mark.parametrize(
  "variant, weights, reduced",
  [
    ("1.1", "float", 700),  # some matrices are larger
    ("1.1", "int4", 700),
    ("BART", "float", 10**7),
    ("T5Gemma", "float", 10**7),
  ],
)
@pytest.mark.slow
def test_kernels_for_gpus_change_logits_by_rounding_only(variant, weights, reduced, monkeypatch):
  """One row, several rows, a tree and its commit, many rows, and texts that share a source."""
  monkeypatch.setattr(kernels, "REDUCED", reduced)
  fused, params = for_decoding(VARIANTS[variant], tiny.params(VARIANTS[variant], 0))
  params = params if weights == "float" else tiny.quantized(params, weights)
  fused = dataclasses.replace(
    fused.with_layout(weights=weights), dropout_rate=reduced / 1e8
  )  # traced anew
  gpu = fused.with_layout(kernels="gpu")
  models = Cached(fused, params), Cached(gpu, tiny.transposed(params))
  tree = TREES["uneven"]
  path = np.flatnonzero(tree.ancestors[-1])[1:]

  def found(model, source, texts):
    """Return logits and hidden states of blocks, and the cache, as arrays [B, 2 G, T, D]."""
    cache = model.prefill(source, 50)
    cache = cache.repeat_rows(texts) if texts > 1 else cache
    rows, outputs = len(source) * texts, []
    tokens = np.random.default_rng(3).integers(0, 21, (rows, 40)).astype(np.int32)
    for block in 1, 1, 6, 20:
      logits, hidden, cache = model.extend(cache, tokens[:, :block])
      cache = model.commit(cache, cache.length + block)
      outputs += [logits, hidden]
    logits, hidden, cache = model.extend(cache, tokens[:, : tree.num_nodes], tree)
    paths = np.broadcast_to(path, (rows, len(path)))
    cache = model.commit(cache, cache.length + 1 + len(path), tree, jnp.asarray(paths))
    outputs += [logits, hidden, *model.extend(cache, tokens[:, :3])[:2]]
    return [*outputs, *(jnp.concatenate(layer, axis=1) for layer in cache.layers)]

  for batch, texts in (1, 1), (2, 2):
    source = tiny.sources(fused, 0, batch)
    want, got = (found(model, source, texts) for model in models)
    for x, y in zip(want, got, strict=True):
      assert np.abs(x - y).max() <= 3e-6 * np.abs(x).max()


# The arithmetic of the paper.


def numpy_t5(params, cfg, source, inputs):
  """Compute the logits [K, table size] of one row in float64, with every formula written out."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(p, x):
    if cfg.biases:
      x = x - x.mean(axis=-1, keepdims=True)
    eps = 1e-5 if cfg.biases else 1e-6
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * p["scale"] + p.get("bias", 0)

  def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)

  def capped(logits, cap):
    return logits if cap is None else cap * np.tanh(logits / cap)

  def rotated(x):  # [T, D], at positions 0 to T - 1
    dim = x.shape[1]
    angle = np.outer(np.arange(len(x)), cfg.rope_theta ** (-np.arange(0, dim, 2) / dim))
    z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=1)

  def attend(p, cfg, x, bias, y=None, rotate=False):  # x [K, E] to y [T, E], bias [H, K, T]
    out, y = [], x if y is None else y
    for h in range(cfg.num_heads):
      group = h * cfg.kv_heads // cfg.num_heads
      query, key, value = (
        dense(p[name], of)[:, n * cfg.head_dim : (n + 1) * cfg.head_dim]
        for name, of, n in (("query", x, h), ("key", y, group), ("value", y, group))
      )
      if rotate:
        query, key = rotated(query), rotated(key)
      logits = capped(query @ key.T, cfg.attention_cap) + bias[h]
      out.append(special.softmax(logits, axis=-1) @ value)
    return dense(p["out"], np.concatenate(out, axis=-1))

  def add_block(layer, name, x, block):
    h = block(norm(layer[f"pre_{name}"], x) if cfg.norm_position != "after" else x)
    if cfg.norm_position == "before":
      return x + h
    after = layer[f"post_{name}"]
    return norm(after, x + h) if cfg.norm_position == "after" else x + norm(after, h)

  def feed_forward(p, x):
    act = {
      "relu": lambda z: np.maximum(z, 0),
      "silu": lambda z: z * special.expit(z),
      "gelu": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
      "gelu_exact": lambda z: z * special.ndtr(z),
    }[cfg.activation]
    if cfg.gated:
      return dense(p["wo"], act(dense(p["wi_0"], x)) * dense(p["wi_1"], x))
    return dense(p["wo"], act(dense(p["wi"], x)))

  def relative(p, size, bucket):
    return np.asarray(
      [[p["rel_embedding"][:, bucket(j - i)] for j in range(size)] for i in range(size)]
    ).transpose(2, 0, 1)

  def bias_of(stack, i, size, bucket):
    if cfg.num_positions or cfg.rope_theta:
      bias = np.zeros((cfg.num_heads * cfg.encoder.num_heads, size, size))  # at least one per head
    else:
      of_layer = stack[f"layers_{i}"] if cfg.bias_per_layer else stack
      bias = relative(of_layer["relpos_bias"], size, bucket)
    away = np.abs(np.arange(size)[:, None] - np.arange(size))
    is_far = cfg.window is not None and i % 2 == 0
    return np.where(is_far & (away >= (cfg.window or 0)), -1e10, bias)

  def embedded(stack, table, tokens):
    x = table[tokens]
    if cfg.num_positions:
      x = x + stack["positions"][: len(tokens)]
    return norm(stack["embedding_norm"], x) if cfg.embedding_norm else x

  table = params["token_embedder"]["embedding"]
  of_source = params["encoder_embedder"]["embedding"] if cfg.encoder_embeddings else table
  p, x = params["encoder"], embedded(params["encoder"], of_source, source)
  hidden = np.where(source == 0, -1e10, 0)  # padding is masked
  rotate = cfg.rope_theta is not None
  for i in range(cfg.num_encoder_layers):
    layer, bias = p[f"layers_{i}"], bias_of(p, i, len(source), bucket_both_ways) + hidden
    attention = functools.partial(attend, layer["attention"], cfg.encoder, bias=bias, rotate=rotate)
    x = add_block(layer, "attention_layer_norm", x, attention)
    x = add_block(layer, "mlp_layer_norm", x, functools.partial(feed_forward, layer["mlp"]))
  encoded = norm(p["encoder_norm"], x) if cfg.has_final_norm else x

  p, x = params["decoder"], embedded(params["decoder"], table, inputs)
  size = len(inputs)
  cross = np.zeros((cfg.num_heads, size, 1)) + hidden
  for i in range(cfg.num_decoder_layers):
    layer = p[f"layers_{i}"]
    bias = np.where(np.tri(size) == 1, bias_of(p, i, size, bucket_backwards), -1e10)
    attention = functools.partial(attend, layer["self_attention"], cfg, bias=bias, rotate=rotate)
    to_source = functools.partial(
      attend, layer["encoder_decoder_attention"], cfg, y=encoded, bias=cross
    )
    x = add_block(layer, "self_attention_layer_norm", x, attention)
    x = add_block(layer, "cross_attention_layer_norm", x, to_source)
    x = add_block(layer, "mlp_layer_norm", x, functools.partial(feed_forward, layer["mlp"]))
  x = norm(p["decoder_norm"], x) if cfg.has_final_norm else x
  if cfg.tied_logits:
    return x / np.sqrt(cfg.emb_dim) @ table.T
  return capped(dense(p["logits_dense"], x), cfg.logits_cap)


def bucket_backwards(distance):
  """Return the bucket of a key at `distance` <= 0: one for each of 0..15, then 16 logarithmic ones
  up to a distance of 128."""
  back = max(-distance, 0)
  return back if back < 16 else 16 + sum(back >= edge for edge in BACKWARDS_EDGES[1:])


def bucket_both_ways(distance):
  """Return the bucket of a key: one for each of 0..7, then 8 logarithmic ones up to a distance of
  128; later keys have 16 further buckets."""
  away = abs(distance)
  bucket = away if away < 8 else 8 + sum(away >= edge for edge in BOTH_WAYS_EDGES[1:])
  return bucket + 16 * (distance > 0)


# First distance of each logarithmic bucket, computed by hand: the smallest integer not below 16 *
# 8^(i/16), i = 0..15, and 8 * 16^(i/8) = 8 * 2^(i/2), i = 0..7.
BACKWARDS_EDGES = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
BOTH_WAYS_EDGES = [8, 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["umT5", "BART", "M2M100", "T5Gemma"])
def test_blocks_of_a_variant_equal_the_teacher_forced_pass(variant):
  cfg = VARIANTS[variant]
  params, source, tokens = tiny.params(cfg, 3), tiny.sources(cfg, 1, 4, 20), text(cfg)
  logits = np.asarray(tiny.teacher_forced(cfg)(params, source, tokens))
  model = Cached(cfg, params)
  cache, at = model.prefill(source), 0
  for block in (1, 4, 9):
    got, cache = model.read(cache, tokens[:, at : at + block])
    np.testing.assert_allclose(got, logits[:, at : at + block], **TOLERANCE[jnp.float32])
    at += block


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_numpy(variant):
  cfg = VARIANTS[variant]
  params, source, inputs = tiny.params(cfg, 3), tiny.sources(cfg, 1, 3, 20), text(cfg, 3)
  inputs = np.concatenate([inputs, inputs[:, 1:]], axis=1)  # long enough for shared buckets
  got = np.asarray(tiny.teacher_forced(cfg)(params, source, inputs))
  for row in range(3):
    want = numpy_t5(params, cfg, source[row], inputs[row])
    np.testing.assert_allclose(got[row], want[:, : cfg.vocab_size], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["decoder", "encoder"])
def test_relative_position_buckets_by_hand(bidirectional):
  """With the table 0..31 the bias is the bucket itself, also at positions far into the text."""
  module = RelativePositionBias(tiny.config(), bidirectional)
  table = jnp.stack([jnp.arange(32.0), -jnp.arange(32.0)])
  # Queries at these positions of two rows, keys 0..299: distances from -299 to 299.
  queries = np.asarray([[0, 1, 150], [17, 298, 299]])

  def bias(keys):
    params = {"rel_embedding": table}
    return module.apply({"params": params}, jnp.asarray(queries), jnp.asarray(keys))

  got = bias(np.arange(300))
  bucket = bucket_both_ways if bidirectional else bucket_backwards
  want = [[[bucket(key - query) for key in range(300)] for query in row] for row in queries]
  np.testing.assert_array_equal(got[:, 0], want)
  np.testing.assert_array_equal(got[:, 1], -np.asarray(want))
  # Key positions may differ between rows.
  keys = np.stack([np.arange(300)[::-1], np.arange(300) // 2])
  np.testing.assert_array_equal(bias(keys), np.stack([got[0][..., keys[0]], got[1][..., keys[1]]]))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own matrix", "tied"])
def test_padded_entries_of_the_vocabulary_have_no_probability(tied):
  cfg = tiny.config(vocab_size=21, padded_vocab_size=32, tied_logits=tied)
  params = tiny.params(cfg, 0)
  model = Cached(cfg, params)
  source = tiny.sources(cfg, 0, 2)
  want, _ = model.read(model.prefill(source), text(cfg, 2))
  assert want.shape == (2, LENGTH, 21) and T5Model(cfg).vocab_size == 21
  # Even large weights of theirs change nothing.
  if tied:
    params["token_embedder"]["embedding"] = params["token_embedder"]["embedding"].at[21:].set(1e3)
  else:
    kernel = params["decoder"]["logits_dense"]["kernel"].at[:, 21:].set(1e3)
    params["decoder"]["logits_dense"]["kernel"] = kernel
  got, _ = model.read(model.prefill(source), text(cfg, 2))
  np.testing.assert_array_equal(got, want)


# Sizes and names.


def shapes(cfg):
  """Return {path: shape} of the parameter tree without allocating it."""
  tree = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
  return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def test_versions_differ_in_feed_forward_and_logits():
  new, old = (shapes(tiny.config(gated=v, tied_logits=not v)) for v in (True, False))
  only_new, only_old = new.keys() - old.keys(), old.keys() - new.keys()
  assert {path.rsplit("/", 2)[-2] for path in only_new} == {"wi_0", "wi_1", "logits_dense"}
  assert {path.rsplit("/", 2)[-2] for path in only_old} == {"wi"}


def test_parameters_have_the_names_of_t5x():
  file = tiny.SHARED / "data/t5x_testdata/test_t5_tiny.checkpoint_0"
  if not file.exists():
    pytest.skip(f"{file} is not there; set SPECDEC_SHARED to the folder that holds data/")
  params = msgpack_restore(file.read_bytes())["optimizer"]["target"]
  cfg = t5_config("tiny")
  theirs = {path: x.shape for path, x in traverse_util.flatten_dict(params, sep="/").items()}
  assert shapes(cfg) == theirs
  source, inputs = tiny.sources(cfg, 0, 2), text(cfg, 2)
  logits = np.asarray(tiny.teacher_forced(cfg)(params, source, inputs))
  assert logits.shape == (2, LENGTH, 32_100)
  assert np.isfinite(logits).all() and logits.std() > 0.01
  want = numpy_t5(params, cfg, source[0], inputs[0])
  np.testing.assert_allclose(logits[0], want[:, :32_100], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_initial_parameters_are_float32_for_any_dtype_of_activations():
  params = init_params(tiny.config(layout=Layout(dtype=jnp.bfloat16)), jax.random.key(0))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_unknown_sizes_raise():
  with pytest.raises(ValueError, match="'huge' is not known; use one of tiny, small"):
    t5_config("huge")
  with pytest.raises(ValueError, match="version '2.0' is not known"):
    t5_config("small", "2.0")
  with pytest.raises(ValueError, match="padded_vocab_size is 10, smaller than vocab_size 16"):
    tiny.config(padded_vocab_size=10)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_version_may_be_a_number(version):
  """Without quotes, the version in a gin file is a number."""
  assert t5_config("small", float(version)) == t5_config("small", version)
  with pytest.raises(ValueError, match="version '1.2' is not known"):
    t5_config("small", 1.2)


def test_published_sizes_can_be_overridden():
  cfg = t5_config("small", dropout_rate=0.1, vocab_size=100, padded_vocab_size=None)
  assert isinstance(cfg, T5Config)
  assert (cfg.dropout_rate, cfg.table_size, cfg.num_heads) == (0.1, 100, 6)
