"""The API reference documents the public names, and pages name what exists."""

import dataclasses
import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys

import gin
import pytest
import tiny_pair

import specdec_jax
from specdec_jax import run

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
  extras = {"data.tasks", "files.beam_pipeline.SpeculativeModelHandler"}
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


def commands(page: pathlib.Path) -> list[list[str]]:
  """Return the commands in the shell examples of a page that this project or an extra provides."""
  found = []
  for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
    block = re.sub(r"\\\n|\.venv/bin/|(?<!\S)#.*", " ", block)
    lexer = shlex.shlex(f"\n{block}\n", posix=True, punctuation_chars="\n|&;<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = [*lexer]
    ends = [i for i, word in enumerate(words) if set(word) <= set(lexer.punctuation_chars)]
    found += [words[start + 1 : end] for start, end in zip(ends, ends[1:])]
  ours = r"(specdec|sacrebleu|tfds|python (-m )?(specdec_jax|experiments|scripts))\b"
  return [words for words in found if re.match(ours, " ".join(words))]


def requirements(page: pathlib.Path) -> tuple[str, ...]:
  """Return what a page installs besides the project: extras, and packages."""
  text = page.read_text()
  extras = re.findall(r"pip install[\w -]*\s'(?:\.|specdec_jax)\[([\w,-]+)\]'", text)
  packages = " ".join(re.findall(r"^pip install ([\w ]+)$", text, re.MULTILINE)).split()
  extras = [f"specdec_jax[{names}]" for names in dict.fromkeys(extras) if names != "test"]
  return *extras, *packages


def with_files_only(words: list[str]) -> list[str]:
  """Return a command of this project without the flags that do not change what it imports."""
  if words[0] not in ("specdec", "python"):
    return words
  count = 2 if words[0] == "specdec" else 3 if words[1] == "-m" else 2
  return words[:count] + [word for word in words[count:] if word.startswith("--gin_file")]


# Pages that install the same share a process, which runs each of their commands once.
COMMANDS: dict[tuple[str, ...], list[list[str]]] = {}
for page in GUIDES:
  for words in map(with_files_only, commands(page)):
    of_all = COMMANDS.setdefault(requirements(page), [])
    of_all += [words] if words not in of_all else []


@pytest.mark.slow
@pytest.mark.parametrize("requirements", [x for x in COMMANDS if COMMANDS[x]], ids=str)
def test_extras_that_a_page_installs_suffice_for_its_commands(requirements):
  """Only packages that pip installs with these extras are found when commands run with --help."""
  if "fiddle" in requirements:
    pytest.importorskip("t5x", reason="t5x is not installed")
  command = [sys.executable, ROOT / "tests" / "help_with_extras.py"]
  command += map(json.dumps, (["specdec_jax", *requirements], COMMANDS[requirements]))
  subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_flags_of_commands_are_settings(page, tmp_path, monkeypatch):
  for package in ("seqio", *(["t5x"] if page.name == "t5x.md" else [])):
    pytest.importorskip(package, reason=f"{package} is not installed")
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(tmp_path)
  for module, name in (("my_drafts", "StammerDraft"), ("my_verifiers", "TenPercentVerifier")):
    found = [block for block in blocks(page) if f"class {name}" in block]
    (tmp_path / f"{module}.py").write_text("".join(found))
  for words in commands(page):
    if words[0] != "specdec" and words[:3] != ["python", "-m", "specdec_jax.run"]:
      continue
    _, files, arguments = run.read_command(words if words[0] == "specdec" else words[2:])
    try:
      run.parse_files(files)
      run.to_bindings(arguments)
    finally:
      gin.clear_config()


def test_ci_runs_tests_that_exist():
  script = (ROOT / ".ci" / "run").read_text()
  names = ",".join(re.findall(r"tests/test_\{([\w,]+)\}\.py", script)).split(",")
  assert len(names) > 1
  for name in names:
    assert (ROOT / "tests" / f"test_{name}.py").exists(), name
