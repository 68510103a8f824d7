"""Script that decodes tiny pairs of several families sharded across virtual devices.

  python tests/partitioned.py NUM_DEVICES               # in this process alone
  python tests/partitioned.py NUM_DEVICES PORT PROCESS  # as one of two processes

The last line of the script's output is JSON; see `main`.
"""

import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import types

if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  # XLA_FLAGS already holds the flags of `conftest.py`, which shorten compilation.
  _flags = os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={sys.argv[1]}"
  os.environ["XLA_FLAGS"] = " ".join(_flags).strip()

import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_pair
from jax.experimental import multihost_utils

from experiments.tpu_v4.hlo import executed_collectives
from specdec_jax.commands.teacher import Teacher, without_draft
from specdec_jax.commands.teacher import decode as decode_sources
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import DraftSpec, Loaded
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.heads import new_head
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.config import GPTConfig
from specdec_jax.models.families import model_of
from specdec_jax.models.partitioning import make_mesh, param_shardings, sharded
from specdec_jax.pair import Pair
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.speculators import speculator_objective
from specdec_jax.train.trainer import TrainSettings, train

CONFIGS = {
  "t5": tiny.config(num_heads=4, layers=1),
  "gpt": GPTConfig(
    vocab_size=16,
    emb_dim=16,
    num_heads=4,
    head_dim=8,
    mlp_dim=32,
    num_decoder_layers=1,
    gated=False,
    biases=True,
    num_positions=24,
  ),
  "t5gemma": tiny.config(layers=1, **tiny.T5GEMMA | dict(num_heads=8, num_kv_heads=4)),
  "bart": tiny.config(num_heads=4, layers=1, **tiny.BART),
}
BATCH, LIMIT = 8, 12
RUNS = {"chain": (chain(3), 1.0), "tree": (branching(2, 2), 1.0)}


def pair(config) -> Pair:
  """Return a pair in the parameter layout of t5x, with a draft that is often accepted."""
  params = tiny_pair.random_params(config, 0)
  rng = np.random.default_rng(1)

  def noisy(x):
    return x + 0.3 * float(x.std()) * rng.normal(size=x.shape).astype(np.float32)

  draft = functools.partial(ModelDraft, model_of(config))
  return Pair(
    Loaded("target", model_of(config), params, vocabulary=None),
    DraftSpec("near", draft, jax.tree.map(noisy, params)),
    max_source_tokens=7,
  )


def decode(pair: Pair, tree: Tree, temperature: float) -> dict:
  """Decode a batch and inspect the compiled program.

  Returns:
    decoded: The result, as lists.
    caches: Shapes [B, H] of the shards of caches [B, H, T, D] in the program.
    messages: Number of collective instructions, and number of collectives executed in one round.
  """
  sampling = Sampling(temperature)
  texts = np.pad(tiny.sources(CONFIGS["t5"], 0, BATCH), ((0, 0), (0, 1)))
  texts[range(BATCH), (texts > 0).sum(axis=1)] = 1  # EOS
  prompt = jnp.asarray(texts)
  first, _ = jax.eval_shape(pair.target.model.prompt_tokens, prompt)
  num_slots = first.shape[1] + LIMIT + tree.num_nodes
  arguments = pair.params, prompt, row_keys(0, 0, BATCH)
  decoder = Decoder(pair.target.model, pair.draft.build(sampling, tree), TokenVerifier(sampling))
  program = Decoder.run.lower(decoder, *arguments, max_new_tokens=LIMIT).compile()
  decoded = multihost_utils.process_allgather(program(decoder, *arguments), tiled=True)
  hlo = program.as_text()
  caches = re.findall(rf"f32\[(\d+),(\d+),{num_slots},8\]", hlo)
  instructions = re.findall(r" (?:all-|reduce-scatter|collective-permute)[a-z-]*\(", hlo)
  return dict(
    decoded=jax.tree.map(lambda x: x.tolist(), decoded._asdict()),
    caches=sorted({(int(batch), int(heads)) for batch, heads in caches}),
    messages=(len(instructions), executed_collectives(hlo)),
  )


def shard_shapes(params) -> dict:
  """Return the shape of the first device's shard of each array, by name."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): array.addressable_shards[0].data.shape
    for path, array in jax.tree.leaves_with_path(params)
  }


def trained(model_parallel: int) -> dict:
  """Train an EAGLE head for four steps of 8 texts; return its metrics and shapes of its shards."""
  rng, target = np.random.default_rng(2), CONFIGS["t5"]
  params = tiny_pair.random_params(target, 0)
  texts = rng.integers(2, 16, (2, 16, 8)).tolist()
  config = new_head(target, "eagle", gamma=3, emb_dim=16, mlp_dim=32)
  objective = speculator_objective(config, target, params, stride=2)
  settings = TrainSettings(2, tokens_per_batch=64, warmup_steps=1, model_parallel=model_parallel)
  with tempfile.TemporaryDirectory() as work:
    text = ParallelText(*texts)
    head_params = train(objective, settings, text, text, work)
    lines = (pathlib.Path(work) / "metrics.jsonl").read_text().splitlines()
  return dict(metrics=[json.loads(line) for line in lines], shard_shapes=shard_shapes(head_params))


def taught() -> list:
  """Return argmax outputs of a teacher sharded across 4 devices, and those of the target alone.

  There are more sources than rows of a batch.
  """
  config, mesh = CONFIGS["t5"], make_mesh(4, _devices())
  params = tiny_pair.random_params(config, 0)
  shards = jax.device_put(params, param_shardings(params, mesh))
  vocabulary = types.SimpleNamespace(eos_id=1, pad_id=0, decode=str, pieces=None)
  sources = [[*row[row > 0].tolist(), 1] for row in tiny.sources(config, 0, 70)]
  pairs = (
    Teacher(vocabulary, config, shards, mesh).pair,
    without_draft(model_of(config), params, vocabulary),
  )
  return [decode_sources(pair, sources) for pair in pairs]


def _devices() -> list[jax.Device]:
  """Return all devices, ordered so that each row and column of the mesh spans both processes."""

  def mesh_position(device):
    local = device.id % jax.local_device_count()
    return local // 2, (device.process_index + local // 2) % 2, local

  return sorted(jax.devices(), key=mesh_position)


def main(port: str = "", process: str = "") -> None:
  """Print results as JSON.

  A key such as "t5 4" names the model family and the size of the mesh's model axis. The value of
  this key holds the result of `decode` for each run and the shard shapes of both models. A single
  process also prints the results of `trained(4)` and `taught()` as "trained 4" and "taught".
  """
  runs = {("t5", 1): ("tree",), ("t5", 4): ("tree",), ("t5", 2): ()}
  runs |= {("gpt", 1): ("chain",), ("gpt", 4): ("chain",)}
  runs |= dict.fromkeys([("t5gemma", 4), ("t5gemma", 8), ("bart", 4), ("bart", 8)], ())
  if port:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    runs = {("t5", 4): ("tree",)}
  results = {}
  for (family, model_parallel), names in runs.items():
    decoding_pair = pair(CONFIGS[family])
    if model_parallel > 1:
      decoding_pair = sharded(decoding_pair, make_mesh(model_parallel, _devices()))
    results[f"{family} {model_parallel}"] = dict(
      runs={name: decode(decoding_pair, *RUNS[name]) for name in names},
      target=shard_shapes(decoding_pair.target.params),
      draft=shard_shapes(decoding_pair.draft.params),
    )
  if not port:
    results |= {"trained 4": trained(4), "taught": taught()}
  print(f"\n{json.dumps(results)}")


if __name__ == "__main__":
  main(*sys.argv[2:])
