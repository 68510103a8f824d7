"""The public namespace is complete, and the API reference documents exactly its names."""

import ast
import dataclasses
import importlib
import pathlib
import re

import pytest
from test_layering import LAYERS

import specdec_jax
from specdec_jax.measure.records import Record

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_every_public_name_can_be_imported():
  for name in specdec_jax.__all__:
    assert getattr(specdec_jax, name) is not None, name
    assert name in dir(specdec_jax)


def test_type_checkers_see_the_public_names_where_they_are_defined():
  defined_in = {}
  for node in ast.walk(ast.parse((ROOT / "specdec_jax" / "__init__.py").read_text())):
    if isinstance(node, ast.If):
      for statement in node.body:
        if isinstance(statement, ast.ImportFrom):
          module = statement.module.removeprefix("specdec_jax.")
          defined_in |= {alias.name: module for alias in statement.names}
  assert defined_in == specdec_jax._DEFINED_IN


def test_reference_documents_exactly_the_public_names():
  pages = sorted((ROOT / "docs" / "api").glob("*.md"))
  names = re.findall(
    r"^(?:\.\. |```\{)auto\w+(?:::|\}) specdec_jax\.(\w+)",
    "\n".join(page.read_text() for page in pages),
    re.MULTILINE,
  )
  assert sorted(names) == sorted(set(specdec_jax.__all__) - {"__version__"})


def test_metrics_page_names_fields_of_records():
  fields = {field.name for field in dataclasses.fields(Record)}
  page = (ROOT / "docs" / "metrics.md").read_text()
  tables = re.findall(r"^\| column \| record field .*\n(?:\|.*\n)+", page, re.MULTILINE)
  assert len(tables) == 4
  rows = [line.split(" | ") for table in tables for line in table.splitlines()[2:]]
  named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
  assert len(named) > 40 and named <= fields


def test_contributing_lists_the_layers_in_order():
  rows = re.findall(r"^\| (`.*) \| .* \| .* \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
  listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
  assert listed == [layer for layer in LAYERS if "." not in layer]


PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("experiments/**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_only_what_exists(page):
  text = page.read_text()
  for path in re.findall(r"\b(?:gin|tests|scripts)/[\w/]+\.(?:gin|py|sh|jsonl?|txt)", text):
    assert (ROOT / path).exists(), path
  code = "\n".join(re.findall(r"^```(?:python)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
  for module, names in re.findall(r"^\s*from (specdec_jax[\w.]*) import (.+)$", code, re.MULTILINE):
    for name in names.split(", "):
      imported = importlib.import_module(module)
      assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), name
  for name in re.findall(r"\bspecdec_jax\.(\w+)\(", code):
    assert name in specdec_jax.__all__, name


def test_ci_runs_tests_that_exist():
  script = (ROOT / ".ci" / "run").read_text()
  (names,) = re.findall(r"tests/test_\{([\w,]+)\}\.py", script)
  for name in names.split(","):
    assert (ROOT / "tests" / f"test_{name}.py").exists(), name
