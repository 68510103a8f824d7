"""Test the command line: gin files, flags, errors and exit statuses."""

import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import warnings

import gin
import pytest

from specdec_jax import __version__, gin_files, run
from specdec_jax.errors import InputError
from specdec_jax.measure import machine
from specdec_jax.xla import enable_compile_cache

ROOT = pathlib.Path(__file__).resolve().parents[1]

EXPERIMENT = """
from collections.abc import Sequence
from typing import Any, Literal

def work(
  output_dir: str,
  gamma: int | Literal["auto"] = 1,
  fault: str | None = None,
  trees: Sequence[Sequence[int]] = (),
  top_p: float = 1.0,
  dry_run: bool = False,
  words: Sequence[str] = (),
  stops: str | Sequence[str] | None = None,
  anything: Any = None,
):
  import os
  from specdec_jax.errors import InputError
  if fault == "input":
    raise InputError("gamma is 0; a round needs at least 1 draft token.")
  if fault == "bug":
    raise ValueError("operands could not be broadcast")
  if fault == "gone":
    open("/nonexistent/model.json")
  if fault == "interrupt":
    raise KeyboardInterrupt
  os.makedirs(output_dir, exist_ok=True)
  print(f"gamma {gamma!r}")

def path(name="a/b") -> str:
  return name

def compile_something(names=()):
  import jax
  jax.jit(lambda x: jax.numpy.sort(x @ x))(jax.numpy.eye(9)).block_until_ready()
  print(names)
"""

HEADER = """# A tiny experiment. It does nothing.
#
# More about it.
from __gin__ import dynamic_registration
from specdec_jax import run
import tiny_work
"""

GIN = f"""{HEADER}
OUTPUT_DIR = %gin.REQUIRED
GAMMA = 4
run.run.experiment = @tiny_work.work
"""

STUDY = f"""{HEADER}
NAMES = ()
run.run.experiment = @tiny_work.compile_something
"""

OUT = "--output_dir=out"


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
  """Put `tiny_work.py` on the path of modules, once, because gin registers its functions."""
  folder = tmp_path_factory.mktemp("modules")
  (folder / "tiny_work.py").write_text(EXPERIMENT)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    yield folder


@pytest.fixture
def folder(tmp_path, monkeypatch, modules):
  """Make a folder with `work.gin` and `experiments/tiny/study.gin` the current folder."""
  (tmp_path / "experiments" / "tiny").mkdir(parents=True)
  (tmp_path / "work.gin").write_text(GIN)
  (tmp_path / "experiments" / "tiny" / "study.gin").write_text(STUDY)
  (tmp_path / "t5x.gin").write_text("import nosuch_t5x\n")
  (tmp_path / "name.gin").write_text(f"{HEADER}tiny_work.work.gamma = @load.load_pair()\n")
  (tmp_path / "value.gin").write_text("NAMES = (a b\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(run, "enable_compile_cache", lambda directory: None)
  return tmp_path


def main(*args: str) -> int:
  """Return the exit status of the command in this process."""
  try:
    return run.main(["specdec", *args])
  finally:
    gin.clear_config()


def output(capsys, *args: str) -> str:
  assert main(*args) == 0
  return capsys.readouterr().out


def error(capsys, *args: str) -> str:
  """Return the message of the one-line error that the command ends with."""
  assert main(*args) == 2
  err = capsys.readouterr().err
  assert err.startswith("error: ") and err.count("\n") == 1, err
  return err


@pytest.mark.parametrize(
  "bindings, gamma",
  [
    ("", 4),  # the macro GAMMA is the value of the parameter gamma
    ("tiny_work.work.gamma = 5", 5),
    ("tiny_work.work.gamma = %OTHER\nOTHER = 6", 6),
  ],
)
def test_macro_is_the_value_of_a_parameter_that_no_file_binds(folder, capsys, bindings, gamma):
  (folder / "work.gin").write_text(GIN + bindings)
  assert output(capsys, "--gin_file=work.gin", OUT) == f"gamma {gamma}\n"


@pytest.fixture
def parsed(folder):
  """Parse a run whose settings have several types."""
  (folder / "work.gin").write_text(
    GIN + "GAMMAS = (3, 5)\nPREFIX = ''\nINPUT = @tiny_work.path()\n"
  )
  run.parse_files(["work.gin"])
  yield
  gin.clear_config()


@pytest.mark.parametrize(
  "arguments, expected",
  [
    ("--gamma 5", "GAMMA = 5"),
    ("--gamma=auto", "GAMMA = 'auto'"),
    ("--gamma %OTHER", "GAMMA = %OTHER"),
    ("--top_p 1", "TOP_P = 1.0"),
    ("--fault 2014", "FAULT = '2014'"),
    ("--fault None", "FAULT = None"),
    ("--prefix '[S2S] '", "PREFIX = '[S2S] '"),
    ("--prefix -", "PREFIX = '-'"),
    ("--prefix=", "PREFIX = ''"),
    ("--input 2014", "INPUT = '2014'"),
    ("--input @tiny_work.path()", "INPUT = @tiny_work.path()"),
    ("--gammas 3", "GAMMAS = (3,)"),
    ("--gammas 3,5", "GAMMAS = (3, 5)"),
    ("--gammas '(3, 5)'", "GAMMAS = (3, 5)"),
    ("--gammas [3]", "GAMMAS = [3]"),
    ("--trees 0,0,1", "TREES = ((0, 0, 1),)"),
    ("--trees '[[0], [0, 1]]'", "TREES = [[0], [0, 1]]"),
    ("--words a,b", "WORDS = ('a', 'b')"),
    ("--stops ', '", "STOPS = ', '"),
    ("--stops '[\", \"]'", "STOPS = [', ']"),
    ("--word a,b", "WORDS = ('a', 'b')"),
    ("--anything 3", "ANYTHING = 3"),
    ("--anything 3x", "ANYTHING = '3x'"),
    ("--dry_run false", "DRY_RUN = False"),
    ("--dry_run", "DRY_RUN = True"),
    ("--dry-run --gamma 1", "DRY_RUN = True, GAMMA = 1"),
    ("--gin.GAMMA=7", "GAMMA = 7"),
    ("--gin.GAMMA 7", "GAMMA = 7"),
    ("--gin.work.path=a/b", "work.path = 'a/b'"),
  ],
)
def test_type_of_a_setting_tells_how_its_flag_is_read(parsed, arguments, expected):
  assert ", ".join(run.to_bindings(shlex.split(arguments))) == expected


@pytest.mark.parametrize(
  "arguments, words",
  [
    ("--gamma 1.5", "--gamma: '1.5' is not a whole number or 'auto'."),
    ("--gamma --top_p 1", "--gamma needs a value: a whole number or 'auto'."),
    ("--gamma", "--gamma needs a value"),
    ("--top_p high", "--top_p: 'high' is not a number."),
    ("--gammas 3,x", "--gammas: '3,x' is not a list of which each is a whole number."),
    ("--dry_run 3", "This run takes no words, and '3' is given."),
    ("--gamma 3 5", "This run takes no words, and '5' is given."),
    ("--draft ngrams", "There is no setting --draft"),  # the run loads no pair
  ],
)
def test_flag_of_another_type_is_reported(parsed, arguments, words):
  with pytest.raises(InputError, match=re.escape(words)):
    run.to_bindings(shlex.split(arguments))


@pytest.mark.parametrize(
  "args, gamma",
  [
    ([], 4),
    (["--gin_bindings=GAMMA = 8"], 8),
    (["--gin.tiny_work.work.gamma=2", "--gin.work.gamma=3"], 3),
    (["--gin_file=later.gin"], 6),
    (["--gin_file=later.gin", "--gin.GAMMA=7"], 7),
    (["--gin.NEW=5", "--gin.GAMMA=%NEW"], 5),
    (["--gamma", "auto"], "auto"),
  ],
  ids=str,
)
def test_flags_override_files_and_later_bindings_override_earlier(folder, capsys, args, gamma):
  (folder / "later.gin").write_text("GAMMA = 6\n")
  assert output(capsys, "--gin_file=work.gin", OUT, *args) == f"gamma {gamma!r}\n"


def test_gin_search_paths_are_searched(folder, capsys):
  (folder / "elsewhere").mkdir()
  (folder / "elsewhere" / "far.gin").write_text("include 'work.gin'\nGAMMA = 11\n")
  args = "--gin_file=far.gin", "--gin_search_paths=nowhere,elsewhere", OUT
  assert output(capsys, *args) == "gamma 11\n"


def test_names_after_a_study_are_its_setting_names(folder, capsys):
  assert output(capsys, "study", "a", "b") == "('a', 'b')\n"


def test_gin_files_of_the_package_are_found_from_any_folder(folder, capsys):
  assert "no parameter" not in error(capsys, "quickstart", "--gama=3")
  assert "--gammas" in error(capsys, "--gin_file=gin/quickstart.gin", "--gama=3")


def test_help_lists_every_run(folder, capsys):
  said = output(capsys, "--help")
  for path in [ROOT / "gin" / "quickstart.gin", *(ROOT / "gin" / "runs").glob("*.gin")]:
    assert f"\n  {path.stem:<20} {gin_files.summary(path)}\n" in said, path
  assert f"\n  {'study':<20} A tiny experiment\n" in said
  assert "--gin_bindings" in said
  assert output(capsys) == said
  assert output(capsys, "--version") == f"specdec_jax {__version__}\n"


def test_help_of_a_run_has_its_comment_and_its_settings(folder, capsys):
  (folder / "more.gin").write_text("# Includes a file.\ninclude 'work.gin'\nBEAMS = None\n")
  said = output(capsys, "--gin_file=more.gin", "--help")
  assert "\nIncludes a file.\n" in said
  for line in ("--output_dir %gin.REQUIRED", "--gamma 4", "--fault None", "--beams None"):
    assert f"  {line}\n" in f"{said}\n"
  assert "--target" not in said
  said = output(capsys, "speedup", "-h")
  assert "  --output_dir runs/speedup             folder for both files\n" in said
  assert "  --gammas '(3, 5, 7)'                  numbers of draft tokens per round" in said
  assert "  --prefix ''                           text prepended to each line that is not" in said
  assert "  ngrams                    a text of the task's outputs exists\n" in said
  assert "On the shelf, complete but slower: stopping, " in said and "  lookahead  " not in said


@pytest.mark.parametrize(
  "args, words",
  [
    (["--seed=3"], ["no run was given"]),
    (["tranlsate"], ["There is no run 'tranlsate'; there are quickstart, ", ", translate, "]),
    (["--gin_file=nosuch.gin"], ["Unable to open file: nosuch.gin."]),
    (["--gin_file"], ["gin_file"]),
    (["--gin_file=gin/models/t5_1_1.gin"], ["No run is in gin/models/t5_1_1.gin; give one too"]),
    (["study", "--gin_file=t5x.gin"], ["No module named 'nosuch_t5x'", "t5x.gin", "line 1"]),
    (["study", "--gin_file=name.gin"], ["'load' was not provided by an import", "name.gin"]),
    (["study", "--gin_file=value.gin"], ["value.gin, line 1"]),
    (["--gin_file=work.gin"], ["OUTPUT_DIR", "%gin.REQUIRED"]),
    (
      ["--gin_file=work.gin", OUT, "--gama", "3"],
      ["no setting --gama; there are --anything, --dry_run, --fault, --gamma, --out"],
    ),
    (
      ["--gin_file=work.gin", OUT, "--gin.GAMA=3"],
      ["no setting --gama; there are --anything, --dry_run, --fault, --gamma"],
    ),
    (["--gin_file=work.gin", OUT, "--gin_bindings=GAMA=3"], ["no setting --gama; there are"]),
    (["--gin_file=work.gin", OUT, "--target=3"], ["no setting --target"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMMA=(3"], ["Expected"]),
    (["--gin_file=work.gin", OUT, "--gin.work.gama=3"], ["parameter named 'gama'"]),
    (["--gin_file=work.gin", OUT, "--gin.play.gamma=3"], ["play"]),
  ],
  ids=lambda value: str(value)[:70],
)
def test_invalid_command_line_is_reported(folder, capsys, args, words):
  said = error(capsys, *args)
  assert all(word in said for word in words), said
  assert not (folder / "out").exists()


def test_macro_without_a_value_is_reported_as_a_flag(folder, capsys):
  (folder / "work.gin").write_text(GIN + "tiny_work.work.gamma = %TARGET_TEXT")
  said = error(capsys, "--gin_file=work.gin", OUT)
  assert said == "error: The gin files need values of --target_text; give these flags.\n"


@pytest.mark.parametrize(
  "command, bound",
  [
    ("translate --dtype bfloat16", {"dtype": "bfloat16", "weights": "stored"}),
    ("translate --weights int8", {"weights": "int8"}),
    ("speedup --target X --draft Y", {"target": "X", "draft": "Y", "dtype": "auto"}),
    ("check --target X --dtype float32", {"target": "X", "dtype": "float32"}),
    ("check --outputs a.jsonl --temperature 1 --top_k 4 --target X", {"target": "X"}),
    ("serve --kernels xla --task a --vocabulary V", dict(kernels="xla", task="a", vocabulary="V")),
    ("decode --extra_ids 0 --source_language fr", {"extra_ids": 0, "source_language": "fr"}),
    ("quickstart --max_source_tokens 9 --draft_weights int4", {"max_source_tokens": 9}),
    ("speedup --gin_file=gin/models/sharded.gin --model_parallel 1 --task a", {"task": "a"}),
    ("speedup --gin_file=gin/models/flan_t5.gin --target %XL", {"vocabulary": "vocabulary.model"}),
    ("trees --verifier tokens --weights stored", {"weights": "stored"}),  # its own are VERIFIERS
  ],
)
def test_parameters_of_the_pair_are_settings_of_a_run(monkeypatch, command, bound):
  monkeypatch.chdir(ROOT)
  _, files, arguments = run.read_command(["specdec", *command.split()])
  try:
    run.parse_files(files)
    run.parse_bindings(run.to_bindings(arguments))
    found = gin.get_bindings("load.load_pair")
  finally:
    gin.clear_config()
  assert {name: found[name] for name in bound} == bound and "verifier" not in found


def test_help_lists_the_parameters_of_the_pair_with_their_meaning(folder, capsys):
  said = output(capsys, "translate", "-h")
  assert re.search(r"^  --target /.+/target  checkpoint of the target ", said, re.MULTILINE)
  assert re.search(r"^  --weights stored +how the matrices of the target are", said, re.MULTILINE)
  assert re.search(r"^  --gamma None +number of draft tokens per round; 5 by default", said, re.M)
  assert not re.search("--(shardings|draft_shardings|num_return_sequences) ", said)
  said = output(capsys, "speedup", "--gin_file=gin/models/random.gin", "-h")
  assert re.search(r"^  --kernels auto +'xla' for XLA only", said, re.MULTILINE)


def test_target_that_does_not_exist_is_reported(folder, capsys):
  said = error(capsys, "translate", "--input", "-", "--target", "here/gone/x", "--draft=gone")
  assert "There is no model in here/gone/x" in said


@pytest.mark.slow
def test_installed_package_contains_the_gin_files_and_its_commit(tmp_path):
  pytest.importorskip("setuptools", minversion="77")  # older ones do not read this pyproject.toml
  build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
  subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
  run = functools.partial(
    subprocess.run,
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(tmp_path / "lib")},
    capture_output=True,
    text=True,
  )
  code = "from specdec_jax import gin_files\nfrom specdec_jax.measure import machine\n"
  code += "print(gin_files.HOME, machine.commit())"
  printed = run([sys.executable, "-c", code])
  assert printed.stdout == f"{tmp_path}/lib/specdec_jax/gin_files {machine.commit()}\n"
  # check.gin includes another file.
  result = run([sys.executable, "-m", "specdec_jax.run", "check", "--gama=3"])
  assert "error: There is no setting --gama; there are --" in result.stderr


def test_errors_and_exit_statuses(folder, capsys):
  def args(fault):
    return "--gin_file=work.gin", OUT, f"--gin.work.fault={fault}"

  message = "error: gamma is 0; a round needs at least 1 draft token.\n"
  assert error(capsys, *args("input")) == message
  assert warnings.formatwarning(UserWarning("text"), UserWarning, "", 1) == "warning: text\n"
  assert main(*args("input"), "--debug") == 2
  err = capsys.readouterr().err
  assert "Traceback" in err and "tiny_work.py" in err and err.endswith(message)
  assert "No such file or directory: '/nonexistent/model.json'" in error(capsys, *args("gone"))
  assert main(*args("interrupt")) == 130
  with pytest.raises(ValueError, match="operands could not be broadcast"):
    main(*args("bug"))


@pytest.mark.slow
def test_installed_command_finds_modules_and_caches_programs_in_the_given_folder(folder):
  (folder / "tiny_work.py").write_text(EXPERIMENT)
  (folder / "bin").mkdir()
  (folder / "bin" / "specdec").write_text("from specdec_jax.run import command\ncommand()\n")
  result = subprocess.run(
    [sys.executable, str(folder / "bin" / "specdec"), "study", "--jax_compilation_cache_dir=cache"],
    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    capture_output=True,
    text=True,
  )
  assert result.stdout == "()\n", result.stderr
  assert list((folder / "cache").iterdir())


def test_compilation_cache_that_cannot_be_created_is_a_warning(tmp_path, monkeypatch, capsys):
  monkeypatch.delitem(sys.modules, "jax")  # whose options stay as they are
  monkeypatch.setattr(os, "environ", dict(os.environ))
  (tmp_path / "file").touch()
  enable_compile_cache(str(tmp_path / "file" / "cache"))
  assert capsys.readouterr().err.startswith("warning: compiled programs are not cached")


def test_find_run_prefers_the_package(folder, monkeypatch):
  (folder / "experiments" / "tiny" / "check.gin").write_text(STUDY)
  assert gin_files.find_run("check") == ROOT / "gin" / "runs" / "check.gin"
  with pytest.raises(InputError, match="There is no run 'work'.*study[.]$"):
    gin_files.find_run("work")
  monkeypatch.chdir(folder / "experiments")
  with pytest.raises(InputError, match="no run 'study'.*; studies need a clone as the current"):
    gin_files.find_run("study")


def test_metadata_excludes_older_flax_on_newer_python():
  """Flax before 0.12.9 breaks with jax 0.11 (from Python 3.12), and pip would keep this Flax."""
  requirements = pytest.importorskip("packaging.requirements")
  text = (ROOT / "pyproject.toml").read_text()
  lines = tomllib.loads(text)["project"]["dependencies"]
  flax = [requirements.Requirement(line) for line in lines if line.startswith("flax")]
  for python, version, satisfied in (
    ("3.11", "0.12.8", True),
    ("3.12", "0.12.8", False),
    ("3.13", "0.12.8", False),
    ("3.13", "0.12.9", True),
  ):
    (one,) = [r for r in flax if r.marker is None or r.marker.evaluate({"python_version": python})]
    assert one.specifier.contains(version) == satisfied, (python, version)


def test_names_of_extras_have_no_underscore():
  """A pip before 23.3 does not find such an extra, and only warns of it."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert not [name for name in project["optional-dependencies"] if "_" in name]
