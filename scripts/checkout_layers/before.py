"""Names that the cases use, as they are at commit 8ecd799.

Each function imports what it needs, so that `after.py` can replace it alone.
"""
# mypy: ignore-errors

import dataclasses
import functools
import importlib
import shutil

import jax
import jax.numpy as jnp
from model_files import write_models

RENAMED: dict[str, str] = {}  # parts of the arguments of commands, and what replaces them
TIMED = "timings", "provenance", "tokens_per_s", "seconds"  # fields that differ between two runs
TABULATE = "specdec_jax.bench.tabulate"


def untimed(values):
  """Return the fields of a line of JSON that are equal in two runs."""
  return {name: value for name, value in values.items() if name not in TIMED}


def table(name, files):
  """Return the headings and the rows of a table."""
  made = importlib.import_module(TABULATE).named_table(name, files)
  return made.columns, made.rows


def open_tokenizer(path, has_encoder):
  """Return the vocabulary in a file or folder."""
  from specdec_jax.data.vocabularies import open_vocabulary
  from specdec_jax.data.vocabulary import ModelTokens

  return open_vocabulary(path, tokens=ModelTokens(has_encoder=has_encoder))


def read_checkpoint(path):
  """Return the configuration of a checkpoint, and its parameters as stored and converted."""
  from specdec_jax.checkpoints.load import load_params, open_checkpoint

  config = open_checkpoint(path).config
  parts = {"stored": load_params(path, config), "half": load_params(path, config, jnp.bfloat16)}
  if not hasattr(config, "kind"):  # no draft head, whose fields differ between checkouts
    parts["config"] = {name: repr(value) for name, value in vars(config).items()}
    fused = dataclasses.replace(config, fused=True, tied_logits=False)
    parts["fused"] = load_params(path, fused)
  return parts


def decodings():
  """Yield (case, function that returns a `DecodeResult`) for each case of the contract test."""
  import test_contract as contract

  cases, plain = dict(contract.CASES), {}
  for case, (models_of, *_) in contract.CASES.items():
    plain.setdefault(models_of, f"no draft, target of {case}")
  nothing = contract.free, contract.chain(0), contract.TokenVerifier
  cases |= {case: (models_of, *nothing) for models_of, case in plain.items()}
  sampled = [getattr(each, "values", each) for each in contract.SAMPLED]  # of pytest.param
  for case, parts in cases.items():
    methods = {"temperature 0": contract.GREEDY, "temperature 1": contract.RANDOM}
    methods |= {"top-k": contract.TOP_K} if (case, "top-k") in sampled else {}
    for method, sampling in methods.items():
      yield f"{case}, {method}", functools.partial(decode, *parts, sampling, contract.LIMIT)


def decode(models_of, draft_of, tree, verifier, sampling, limit):
  """Return the result of a case of the contract test, with log-probabilities."""
  from specdec_jax.core.decode import Decoder
  from specdec_jax.core.types import Params

  models, keys = models_of(), jax.random.split(jax.random.key(0), 6)
  draft, params = draft_of(models, sampling, tree)
  decoder = Decoder(models.target, draft, verifier(sampling), records_log_probs=True)
  return decoder.run(Params(models.params, params), models.prompts, keys, max_new_tokens=limit)


def write_files(folder):
  """Write tiny pairs, tokenizers, and checkpoints of all formats, families and draft heads."""
  import test_checkpoints_formats as formats
  import test_checkpoints_gpt2 as gpt2
  import test_vocabularies as vocabularies
  import tiny
  import tiny_pair
  from specdec_jax.checkpoints.folder import save_model

  from specdec_jax.drafts.heads import HEADS, SpeculatorConfig

  tiny_pair.gpt_folder()
  shutil.copytree(tiny_pair.folder(), folder / "pair")
  for name, make in vocabularies.NAMES.items():
    make(folder / "tokenizers" / name)
  (folder / "tokenizers" / "gpt2").mkdir()
  gpt2.byte_pairs().save(str(folder / "tokenizers" / "gpt2" / "tokenizer.json"))
  models = folder / "checkpoints"
  write_models(models)
  for version, config in formats.CONFIGS.items():
    for dtype in ("float32", "bfloat16"):
      tree = jax.tree.map(lambda x: x.astype(dtype), formats.params(config))  # noqa: B023
      for name, write in formats.FORMATS.items():
        write(models / f"{name} {version} {dtype}".replace(" ", "_"), config, tree)
  arrays = gpt2.tensors(gpt2.params(gpt2.CONFIG))
  for name, num_files in {"gpt2": 1, "gpt2_files": 3}.items():
    gpt2.write(models / name, arrays, num_files)
  own = {"gpt": tiny.gpt_config(), "bart": tiny.config(**tiny.BART)}
  own["t5gemma"] = tiny.config(**tiny.T5GEMMA)
  sizes = dict(vocab_size=16, state_dim=16, emb_dim=8, mlp_dim=16, num_heads=2, head_dim=8, rank=4)
  for kind in HEADS:
    own[f"head_{kind}"] = SpeculatorConfig(kind=kind, gamma=4, num_decoder_layers=1, **sizes)
  for name, config in own.items():
    save_model(str(models / f"own_{name}"), config, tiny_pair.random_params(config, 5))
