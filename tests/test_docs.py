"""The API reference documents the public names, and pages name what exists."""

import dataclasses
import importlib
import pathlib
import re

import pytest
import tiny_pair

import specdec_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("experiments/**/*.md"))


def reference() -> list[str]:
  """Return the names of the API reference, without `specdec_jax.`."""
  pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
  return re.findall(r"^\.\. auto\w+:: specdec_jax\.([\w.]+)", pages, re.MULTILINE)


def blocks(page: pathlib.Path) -> list[str]:
  """Return the Python examples of a page."""
  return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_reference_documents_the_public_names():
  names = reference()
  assert len(set(names)) == len(names)
  assert {name for name in names if "." not in name} == {*specdec_jax.__all__}
  for name in names:
    module, _, attribute = f"specdec_jax.{name}".rpartition(".")
    assert getattr(importlib.import_module(module), attribute), name


def test_guides_import_public_names():
  """Apart from modules that need a package of an extra, which the reference does not import."""
  extras = {"data.tasks", "serve.beam_pipeline.SpeculativeModelHandler"}
  public = {f"specdec_jax.{name}" for name in {*reference(), *extras}}
  imported = set()
  for block in (block for page in GUIDES for block in blocks(page)):
    for module, names in re.findall(r"^from (specdec_jax[\w.]*) import (.+)$", block, re.MULTILINE):
      imported |= {f"{module}.{name}" for name in names.split(", ")}
  assert len(imported) > 20 and not imported - public


def test_own_draft_and_verifier_of_the_guides():
  (stammer,) = (block for block in blocks(ROOT / "docs" / "drafts.md") if "StammerDraft" in block)
  (ten,) = (block for block in blocks(ROOT / "docs" / "verifiers.md") if "TenPercent" in block)
  names: dict = {}
  exec(stammer + ten, names)
  pair, settings = tiny_pair.pair(), dict(texts=["A man", "Two dogs"], max_new_tokens=12)
  plain = [*map(str, pair.generate(gamma=0, **settings))]
  stammer_pair = pair.with_draft(names["stammer"](pair.target))
  # At temperature 0, p is 0 or 1, and this verifier is exact too.
  ten_percent = dataclasses.replace(pair, verifier=names["TenPercentVerifier"])
  for each, shape in ((stammer_pair, [0, 0, 1]), (ten_percent, [0, 1]), (ten_percent, [0, 0, 1])):
    assert [*map(str, each.generate(tree=shape, **settings))] == plain


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
