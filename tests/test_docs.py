"""The API reference documents the public names, and pages name what exists."""

import importlib
import pathlib
import re

import pytest

import specdec_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("experiments/**/*.md"))


def test_reference_documents_the_public_names():
  pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
  names = re.findall(r"^\.\. auto\w+:: specdec_jax\.([\w.]+)", pages, re.MULTILINE)
  assert len(set(names)) == len(names)
  assert {name for name in names if "." not in name} == {*specdec_jax.__all__}
  for name in names:
    module, _, attribute = f"specdec_jax.{name}".rpartition(".")
    assert getattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_only_what_exists(page):
  text = page.read_text()
  files = r"\b(?:experiments|gin|tests|scripts)/[\w/]+\.(?:gin|py|sh|jsonl?|txt|csv)\b"
  for path in re.findall(files, text):
    assert (ROOT / path).exists(), path
  for module, names in re.findall(r"^from (specdec_jax[\w.]*) import (.+)$", text, re.MULTILINE):
    folder = ROOT.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for name in names.split(", "):  # the module may need a package that is not installed
      is_defined = re.search(rf"\b{name}\b", file.read_text())
      assert is_defined or (folder / name).exists() or (folder / f"{name}.py").exists(), name
  for name in re.findall(r"\bspecdec_jax\.(\w+)\(", text):
    assert name in specdec_jax.__all__, name


def test_ci_runs_tests_that_exist():
  script = (ROOT / ".ci" / "run").read_text()
  (names,) = re.findall(r"tests/test_\{([\w,]+)\}\.py", script)
  for name in names.split(","):
    assert (ROOT / "tests" / f"test_{name}.py").exists(), name
