"""Test that modules import lower layers only, and heavy packages only where they are needed."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specdec_jax"

JAX = {"jax", "jaxtyping", "numpy"}
FLAX = JAX | {"flax"}
PEERS = {"ctranslate2", "gguf", "llama_cpp", "onnxruntime", "optimum", "torch", "transformers"}

# From the bottom up: a layer may import itself, the layers listed before it, the standard library
# and the packages listed next to it.
LAYERS = {
  "xla_flags": set(),
  "errors": set(),
  "version": set(),
  "gin_files": set(),
  "run_settings": set(),
  "machine": set(),
  "atomic_files": set(),
  "compile_cache": set(),
  "interrupt": set(),
  "progress": {"rich"},
  "memory": JAX,
  "settings": JAX,
  "filters": JAX,
  "theory": JAX,
  "execution": {"numpy"},
  "core": set(),
  "core.arrays": JAX,
  "core.trees": JAX,
  "core.processors": JAX,
  "core.sampling": JAX,
  "core.types": JAX,
  "core.verify": JAX,
  "core.decode": JAX,
  "wrappers": JAX,
  "loading": JAX,
  "adaptive": JAX,
  "verifiers": JAX,
  "extended_theory": JAX,
  "logits_processors": JAX,
  "tries": JAX,
  "generation": JAX,
  "kernels": JAX,
  "models": FLAX,
  "data": {
    *("numpy", "rouge_score", "sacrebleu", "sentencepiece", "tokenizers"),
    *("seqio", "tensorflow", "tensorflow_datasets"),
  },
  "beam_search": JAX,
  "drafts": FLAX,
  "partitioning": FLAX,
  "checkpoints": FLAX | {"huggingface_hub", "msgpack", "safetensors", "tensorstore"},
  "counts": {"numpy"},
  "continuous_batching": JAX,
  "slots": JAX,
  "pairs": JAX,
  "training": FLAX | {"optax", "orbax", "rich"},
  "records": set(),
  "reporting": {"jinja2", "markupsafe", "matplotlib", "numpy", "pandas", "rich"},
  "measurement": FLAX | {"rich"},
  "outputs": {"numpy", "rich"},
  "api": JAX,
  "serving": JAX | {"starlette", "uvicorn"},
  "exactness": FLAX | {"scipy"},
  "t5x_model": FLAX | {"gin", "seqio", "t5x"},
  "commands": FLAX | {"apache_beam", "rich", "sacrebleu"},
  "bench": FLAX | PEERS | {"matplotlib", "rich"},
  "user_errors": set(),
  "run": {"gin", "absl"},
}

# Layers that may import only some of the layers below them.
ONLY = {
  "records": {"errors", "version", "atomic_files"},
  "reporting": {"errors", "version", "atomic_files", "core.types", "theory", "records"},
  "user_errors": {"errors"},
  "run": {
    *("errors", "version", "compile_cache", "gin_files", "interrupt", "run_settings"),
    "user_errors",
  },
}

CORE = ("xla_flags", "errors", "version", "memory", "settings", "filters", "theory", "atomic_files")
CORE += tuple(layer for layer in LAYERS if layer.startswith("core.")) + (
  "wrappers",
  "loading",
  "adaptive",
  "verifiers",
  "extended_theory",
  "logits_processors",
  "tries",
  "generation",
  "kernels",
  "models",
  "drafts",
)


# Besides the core, the layers that specdec_jax/__init__.py takes public names from.
PUBLIC = ("execution", "beam_search", "partitioning", "pairs", "outputs", "api")


def imports(source: str) -> set[str]:
  """Return the names of all modules that a source file imports, at the top or inside functions."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative imports hide the layer"
      # `from specdec_jax import theory` imports specdec_jax.theory.
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def violations(layer: str, source: str) -> list[str]:
  """Return the forbidden imports of a module of `layer` ('' for specdec_jax/__init__.py)."""
  below = [*LAYERS][: [*LAYERS].index(layer)] if layer else (*CORE, *PUBLIC)
  allowed = ONLY.get(layer, set(below)) | {layer}
  packages = LAYERS[layer] if layer else FLAX
  wrong = []
  for name in sorted(imports(source)):
    top, _, rest = name.partition(".")
    if top == "specdec_jax":
      if top_layer(rest) not in allowed:
        wrong.append(name)
    elif top not in packages and top not in sys.stdlib_module_names:
      wrong.append(name)
  return wrong


def top_layer(name: str) -> str:
  """Return the layer of a module, relative to `specdec_jax`; each module of `core` is a layer."""
  first, _, rest = name.partition(".")
  return f"core.{rest.partition('.')[0]}" if first == "core" and rest else first


def layer_of(path: pathlib.Path) -> str:
  name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
  return top_layer(name.removesuffix("__init__").removesuffix("."))


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_lower_layers_only(path):
  layer = layer_of(path)
  assert not layer or layer in LAYERS, f"{layer} is missing in LAYERS; add it"
  assert violations(layer, path.read_text()) == []


def test_imports_have_no_cycle():
  modules = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in MODULES
  }
  edges = {}
  for path in MODULES:
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    imported = imports(path.read_text())
    edges[name] = (imported | {i.rpartition(".")[0] for i in imported}) & modules - {name}
  assert len([*graphlib.TopologicalSorter(edges).static_order()]) == len(modules)


@pytest.mark.parametrize(
  "layer, source",
  [
    ("core.decode", "from specdec_jax.measure import alpha"),
    ("core.decode", "from specdec_jax.models.t5 import T5Model"),
    ("core.decode", "from specdec_jax import models"),
    ("core.decode", "def f():\n  import tensorflow as tf"),
    ("core.verify", "from specdec_jax.core.decode import one_round"),
    ("core.types", "from specdec_jax.core.verify.tokens import TokenVerifier"),
    ("core.sampling", "import flax.linen as nn"),
    ("models", "import gin"),
    ("commands", "import gin.tf"),
    ("commands", "from absl import flags"),
    ("commands", "from t5x import models"),
    ("commands", "def f():\n  import torch"),
    ("commands", "from experiments.peers import comparison"),
    ("training", "import seqio"),
    ("records", "import jax"),
    ("records", "from specdec_jax.core.types import DecodeResult"),
    ("reporting", "from specdec_jax.measure.alpha import measure_alpha"),
    ("", "from specdec_jax.data.vocabulary import Vocabulary"),
    ("", "import sentencepiece"),
  ],
)
def test_forbidden_imports_are_found(layer, source):
  assert len(violations(layer, source)) == 1


def test_core_runs_without_tensorflow_seqio_or_gin():
  absent = ("tensorflow", "tensorflow_datasets", "seqio", "gin", "t5x", "sentencepiece")
  absent += ("matplotlib", "sacrebleu")
  core = ["specdec_jax", *(f"specdec_jax.{layer}" for layer in CORE)]
  for folder in ("core/verify", "kernels", "models", "drafts"):
    core += [
      f"specdec_jax.{folder.replace('/', '.')}.{path.stem}"
      for path in (PACKAGE / folder).glob("[a-z]*.py")
    ]
  code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "\n".join(
    f"import {module}" for module in core
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_all_but_tasks_runs_without_the_extra_of_tasks():
  """Only `seqio_tasks` imports the packages of `[tasks]`; `tasks` reports that they are missing."""
  absent = "seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text", "t5x"
  names = [p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for p in MODULES]
  needing_extras = re.compile(r"t5x_model|\.seqio_tasks$|\.beam_pipeline$")
  others = [name for name in names if not needing_extras.search(name)]
  code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({absent}))
from specdec_jax.errors import InputError
for name in {others}:
  importlib.import_module(name.removesuffix(".__init__"))
from specdec_jax.data import tasks
for use in (lambda: tasks.sources("specdec_cnn_dm"), lambda: tasks.add_task):
  try:
    use()
  except InputError as error:
    print(error)
"""
  command = [sys.executable, "-c", code]
  result = subprocess.run(
    command, cwd=ROOT, check=True, timeout=240, capture_output=True, text=True
  )
  first, second = result.stdout.splitlines()
  assert first.startswith("Task specdec_cnn_dm needs seqio and TensorFlow, which are not installed")
  assert second.startswith("tasks.add_task needs seqio") and "'specdec_jax[tasks]'" in second


DIRECT_WRITES = r"\.write_(text|bytes)\(|os\.(replace|rename)\(|mkstemp|open\([^)]*[\"'][wx]"


def test_files_are_written_by_atomic_files_only():
  """Other modules would have to repeat how `atomic_files` handles failures, links and pipes."""
  wrong = [
    str(path.relative_to(ROOT))
    for path in [*MODULES, *(ROOT / "scripts").glob("*.py")]
    if re.search(DIRECT_WRITES, path.read_text())
  ]
  # `run` opens standard error if it is closed.
  assert wrong == ["specdec_jax/atomic_files.py", "specdec_jax/run.py"]


@pytest.mark.parametrize("folder", ["gin", "configs", "scripts"])
def test_folders_next_to_the_package_are_not_packages(folder):
  # gin/__init__.py would shadow the gin library in runs from the checkout.
  assert not (ROOT / folder / "__init__.py").exists()
