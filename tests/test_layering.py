"""Test what the modules of the package import, at the top of a module or inside functions."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

from specdec_jax import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]


def modules_in(*folders: str) -> dict[str, pathlib.Path]:
  """Return the path of each module in folders of the project, by its dotted name."""
  paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
  names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
  return dict(zip((name.removesuffix(".__init__") for name in names), paths))


FILES = modules_in("specdec_jax")

# Modules, what they must not import, and an example. A pattern matches a dotted name or its first
# parts; names of modules omit `specdec_jax.`.
RULES = [
  ("core|theory", r"specdec_jax\.(?!core|errors).*", "core.decode -> specdec_jax.models"),
  (
    "models|beams",
    r"specdec_jax\.(?!core|errors|models|beams).*",
    "models.t5 -> specdec_jax.drafts.model.ModelDraft",
  ),
  (
    "data|checkpoints",
    r"specdec_jax\.(?!core|errors|models|data|checkpoints|registry).*",
    "checkpoints.save -> specdec_jax.drafts.heads.DraftHead",
  ),
  (
    "registry|flag_values",
    r"specdec_jax\.(?!core|errors|registry).*",
    "registry -> specdec_jax.drafts.uniform",
  ),
  (
    "data|drafts|checkpoints|load|pair|random_models",
    r"specdec_jax\.(measure|train|exactness|batching|serve|t5x|commands|run)",
    "drafts.ngram -> specdec_jax.measure.alpha",
  ),
  ("(?!contrib).*", r"specdec_jax\.contrib", "load -> specdec_jax.contrib.lookahead"),
  ("(?!commands|run).*", r"specdec_jax\.(commands|run)", "generate -> specdec_jax.run"),
  (".*", "experiments|scripts|tests", "load -> experiments.summaries.replay"),
  ("core|theory|beams", "flax", "core.sampling -> flax.linen"),
  ("(?!run).*", "gin|absl", "commands.train -> absl.flags"),
  ("serve", r"specdec_jax\.files", "serve.service -> specdec_jax.files.records"),
  ("files", r"specdec_jax\.serve", "files.records -> specdec_jax.serve.service"),
  (r"(?!files\.beam_pipeline).*", "apache_beam", "commands.decode -> apache_beam"),
  ("(?!data|t5x).*", "seqio|t5x|tensorflow.*", "train.batches -> tensorflow_datasets"),
  (r"(?!measure\.report).*", "matplotlib|pandas|jinja2", "measure.tables -> pandas"),
  (".*", "torch|ctranslate2|optimum|llama_cpp", "data.text -> torch"),
]


def imports(source: str) -> set[str]:
  """Return the names of all modules that a source file imports, or imports names from."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative imports hide the folder"
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def violations(modules: str, forbidden: str, module: str, source: str) -> list[str]:
  """Return the imports of a module that a rule forbids."""
  if not re.match(rf"({modules})(\.|$)", module.removeprefix("specdec_jax").removeprefix(".")):
    return []
  return [name for name in imports(source) if re.match(rf"({forbidden})(\.|$)", name)]


@pytest.mark.slow
@pytest.mark.parametrize("modules, forbidden, example", RULES)
def test_rule(modules, forbidden, example):
  module, imported = example.split(" -> ")
  assert violations(modules, forbidden, module, f"def f():\n  import {imported}")
  for name, path in FILES.items():
    assert not violations(modules, forbidden, name, path.read_text()), name


def dependencies(depth: int | None, files: dict[str, pathlib.Path]) -> dict[str, set[str]]:
  """Return what modules import from `files`, or the first `depth` parts of their names."""
  graph: dict[str, set[str]] = {}
  for name, path in files.items():
    for imported in imports(path.read_text()):
      while imported not in files and "." in imported:
        imported = imported.rpartition(".")[0]
      node, other = (".".join(full.split(".")[:depth]) for full in (name, imported))
      # Modules may import `__version__`, which is defined before the package imports anything.
      if other in files and other not in (node, "specdec_jax"):
        graph.setdefault(node, set()).add(other)
  return graph


@pytest.mark.parametrize("depth", [2, None], ids=["folders", "modules"])
def test_imports_have_no_cycle(depth):
  graph = dependencies(depth, FILES)
  list(graphlib.TopologicalSorter(graph).static_order())
  graph["specdec_jax.errors"] = {"specdec_jax.generate"}
  with pytest.raises(graphlib.CycleError):
    list(graphlib.TopologicalSorter(graph).static_order())


def test_functions_are_named_by_text_in_the_registry_only():
  """The registry names verifiers of the core, drafts, and the shelf, and no modules around them."""
  entries = [*registry.DRAFTS.values(), *registry.VERIFIERS.values()]
  paths = [*(entry.path for entry in entries), *registry.HEADS.values()]
  modules = {path.partition(":")[0] for path in paths}
  allowed = r"specdec_jax\.(core\.verify|drafts|contrib|load)\b"
  assert modules <= FILES.keys() and all(re.match(allowed, name) for name in modules)
  as_text = re.compile(r"[\"']specdec_jax\.[\w.]+:\w+[\"']")
  naming = {name for name, path in FILES.items() if as_text.search(path.read_text("utf-8"))}
  assert naming == {"specdec_jax.registry"}


def test_parts_and_imports_between_them_are_few():
  """A part is a folder or module directly in the package; each other folder is one part."""
  others = modules_in("experiments", "scripts")
  graph = dependencies(2, FILES)
  for name, imported in dependencies(None, FILES | others).items():
    if name in others:
      parts = {".".join(each.split(".")[:2]) for each in imported if each in FILES}
      graph.setdefault(name.partition(".")[0], set()).update(parts)
  parts = {*graph, *(part for imported in graph.values() for part in imported)}
  assert len(parts) <= 30
  assert sum(map(len, graph.values())) <= 166


def import_without(absent: str, modules: list[str]) -> None:
  """Import modules in a process in which the packages `absent` cannot be imported."""
  code = f"import sys; sys.modules.update(dict.fromkeys({absent.split()}))\n"
  code += "\n".join(f"import {module}" for module in modules)
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)


@pytest.mark.slow
def test_core_runs_without_tensorflow_seqio_or_gin():
  core = re.compile(r"specdec_jax(\.(core|theory|models|beams|drafts)\b|$)")
  absent = "tensorflow tensorflow_datasets seqio t5x gin matplotlib sacrebleu jinja2"
  import_without(absent, [*filter(core.match, FILES)])


@pytest.mark.slow
def test_all_but_tasks_runs_without_the_extra_of_tasks():
  needing_extras = re.compile(r"specdec_jax\.(t5x|data\.seqio_tasks|files\.beam_pipeline)\b")
  absent = "tensorflow tensorflow_datasets tensorflow_text seqio t5x pandas rouge_score"
  import_without(absent, [name for name in FILES if not needing_extras.match(name)])


@pytest.mark.parametrize("folder", ["gin", "configs", "scripts"])
def test_folders_next_to_the_package_are_not_packages(folder):
  # gin/__init__.py would shadow the gin library in runs from the checkout.
  assert not (ROOT / folder / "__init__.py").exists()
