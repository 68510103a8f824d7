"""Test that every gin file of the package parses, and the values of its settings."""

import copy
import inspect
import pathlib
import re
import subprocess
import sys

import gin
import pytest

from specdec_jax import run
from specdec_jax.commands.check import SAMPLINGS
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair

GIN = pathlib.Path(__file__).resolve().parents[1] / "gin"
RUNS = sorted(path.stem for path in (GIN / "runs").glob("*.gin"))
# Files that change the pair or the task of a run. test_tasks.py tests the
# tasks of seqio, whose module reads the environment when it is imported.
AFTER = [
  f"{kind}/{path.stem}"
  for kind in ("models", "tasks")
  for path in sorted((GIN / kind).glob("*.gin"))
  if path.stem not in ("cnn_dm", "finetune_t5", "training_text", "wmt_ende")
]
# Files that are read after another one.
BEFORE = {
  "models/random_hierarchical": "models/random",
  "models/random_speculator": "models/random",
  "models/sharded": "models/random",
}


def parse(*names: str) -> None:
  """Parse the files as a run does and check that no reference names an abstract class."""
  try:
    run.parse_gin([str(GIN / f"{name}.gin") for name in names])
    for reference in gin.config.iterate_references(gin.config._CONFIG):
      assert not inspect.isabstract(reference.configurable.wrapped), reference
  finally:
    gin.clear_config()


def value_of(macro: str, *names: str, bindings: tuple[str, ...] = ()):
  """Return the value of a macro in a run that reads the given gin files."""
  try:
    run.parse_gin([str(GIN / f"{name}.gin") for name in names], bindings)
    return copy.deepcopy(gin.query_parameter(f"%{macro}"))
  finally:
    gin.clear_config()


@pytest.mark.parametrize("name", ["quickstart", *(f"runs/{name}" for name in RUNS)])
def test_run_parses(name):
  parse(name)


@pytest.mark.parametrize("name", AFTER)
def test_run_parses_with_a_model_or_task(name):
  if name == "models/checkpoints":
    with pytest.raises(InputError, match="TARGET"):  # it has no default
      parse("runs/speedup", name)
  else:
    parse("runs/speedup", *filter(None, [BEFORE.get(name)]), name)


def test_installed_package_contains_what_its_gin_files_use(tmp_path):
  """Studies are not installed."""
  build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
  subprocess.run(build, cwd=GIN.parent, check=True, capture_output=True)
  assert not [*tmp_path.rglob("experiments")]
  package = tmp_path / "specdec_jax"
  for path in sorted((package / "gin_files" / "gin").rglob("*.gin")):
    text = path.read_text()
    assert "from experiments" not in text and "include 'experiments" not in text, path
    used = [package / "gin_files" / name for name in re.findall(r"^include '(gin/.+)'", text, re.M)]
    used += [
      package / "gin_files" / "gin" / name
      for name in re.findall(r"'(tasks/.+\.(?:txt|jsonl))'", text)
    ]
    used += [package / "assets" / name for name in re.findall(r"asset\.name = '(.+)'", text)]
    for module in re.findall(r"^from (specdec_jax\S*) import (\w+)", text, re.M):
      module = tmp_path.joinpath(*".".join(module).split("."))
      used.append(module if module.is_dir() else module.with_suffix(".py"))
    assert [name for name in used if not name.exists()] == [], path


@pytest.mark.parametrize(
  "macro, name", [("INPUT", "speedup"), ("INPUT", "check"), ("TARGET_TEXT", "speedup")]
)
def test_missing_default_text_falls_back_to_a_bundled_text(
  macro, name, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  path = pathlib.Path(value_of(macro, f"runs/{name}"))
  assert path.parent == GIN / "tasks" and path.read_text(encoding="utf-8").count("\n") == 300
  note = capsys.readouterr().err
  assert note.count("\n") == 1 and str(path) in note and f"--{macro.lower()}" in note


@pytest.mark.parametrize("name, count", [("check", 200), ("speedup", 300)])
def test_runs_read_the_bundled_captions(name, count, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  texts = (GIN / "tasks/captions.en.txt").read_text(encoding="utf-8").splitlines()
  assert value_of("TEXTS", f"runs/{name}") == texts[:count]


def test_missing_file_is_an_error(tmp_path, monkeypatch):
  with pytest.raises(InputError, match="There is no text file at gone.txt"):
    value_of("TEXTS", "runs/speedup", bindings=("INPUT = 'gone.txt'",))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(InputError, match="the default of DATA, does not exist; --data names another"):
    value_of("DATA", "runs/train_target")


def test_data_folder_of_the_environment_is_used(tmp_path, monkeypatch):
  monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
  (tmp_path / "multi30k").mkdir()
  path = tmp_path / "multi30k" / "test_2016_flickr.en.gz"
  path.touch()
  assert value_of("INPUT", "runs/speedup") == str(path)


@pytest.mark.parametrize("name", ["tasks/articles", "models/gpt2"])
def test_text_of_another_task_is_not_the_default_of_ngrams(name):
  assert value_of("TARGET_TEXT", "runs/speedup", name) == "outputs.txt"


def test_bundled_captions_have_a_translation_each():
  sources, targets = (
    (GIN / f"tasks/captions.{side}.txt").read_text(encoding="utf-8").splitlines()
    for side in ("en", "de")
  )
  assert len(sources) == len(targets) == len({*sources}) == len({*targets}) == 300


def test_exactness_checker_samples_at_a_temperature_other_than_1():
  """At temperature 1, a q that ignores the temperature would pass."""
  assert not {sampling.temperature for sampling in SAMPLINGS} <= {0, 1}


@pytest.mark.parametrize(
  "name",
  ["quickstart", *(f"runs/{n}" for n in "check decode serve speedup transcribe translate".split())],
)
def test_runs_use_the_pair_of_load_pair(name):
  ours, default = value_of("PAIR", name), load_pair()
  assert ours.target.path == default.target.path
  assert ours.draft.path == default.draft.path


def test_verifier_bound_by_gin_creates_an_instance_of_the_original_class():
  """Gin binds a subclass in place of a class, as for VERIFIER of gin/t5x/infer.gin."""
  text = "from __gin__ import dynamic_registration\nfrom specdec_jax.core.verify import tokens\n"
  try:
    gin.parse_config(text + "VERIFIER = @tokens.TokenVerifier")
    verifier = gin.query_parameter("%VERIFIER").scoped_configurable_fn
  finally:
    gin.clear_config()
  assert verifier is not TokenVerifier
  assert (
    verifier(Sampling()).with_lenience(1.0)
    == TokenVerifier(Sampling())
    != verifier(Sampling()).with_lenience(0.5)
  )
