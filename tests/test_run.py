"""Test the command line: gin files, flags, one-line errors and exit statuses.

Each test runs the command on a tiny experiment in a subprocess, as a user would.
"""

import functools
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from specdec_jax import __version__, gin_files, run_settings
from specdec_jax.errors import InputError
from specdec_jax.measure import machine

ROOT = pathlib.Path(__file__).resolve().parents[1]

EXPERIMENT = """
import sys

def work(output_dir, gamma=1, fault=None):
  import os
  from specdec_jax.errors import InputError
  if fault == "input":
    raise InputError("gamma is 0; a round needs at least 1 guess.")
  if fault == "bug":
    raise ValueError("operands could not be broadcast")
  if fault == "gone":
    open("/nonexistent/model.json")
  if fault == "interrupt":
    raise KeyboardInterrupt
  if fault == "module":
    import nonexistent_package
  os.makedirs(output_dir, exist_ok=True)
  with open(os.path.join(output_dir, "out.txt"), "a") as f:
    f.write(f"gamma {gamma}\\n")
  print(f"gamma {gamma}, jax {'jax' in sys.modules}")

def open_something():
  with open(__file__) as f:
    print(f"descriptor {f.fileno()}")

def compile_something():
  import jax
  jax.jit(lambda x: jax.numpy.sort(x @ x))(jax.numpy.eye(9)).block_until_ready()
"""

HEADER = """
from __gin__ import dynamic_registration
from specdec_jax import run
import tiny_work
"""

GIN = f"""{HEADER}
OUTPUT_DIR = %gin.REQUIRED
GAMMA = 4
run.run.experiment = @tiny_work.work
tiny_work.work:
  output_dir = %OUTPUT_DIR
  gamma = %GAMMA
"""

OUT = "--gin.OUTPUT_DIR='out'"


@pytest.fixture
def command(tmp_path):
  """Return a function that runs the command in a folder with `tiny_work.py` and `work.gin`."""
  (tmp_path / "tiny_work.py").write_text(EXPERIMENT)
  (tmp_path / "work.gin").write_text(GIN)

  def run(*args, closed="", **environment):
    command = [sys.executable, "-m", "specdec_jax.run", *args]
    return subprocess.run(
      ["sh", "-c", f'exec "$@" {closed}', "sh", *command] if closed else command,
      cwd=tmp_path,
      env={
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        **environment,
      },
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=120,
    )

  run.dir = tmp_path
  return run


def assert_input_error(result, *words):
  """Assert status 2 and a one-line error that has all `words` and no internals of Python."""
  assert result.returncode == 2, result
  assert result.stderr.startswith("error: ") and result.stderr.endswith((".\n", "?\n"))
  assert result.stderr.count("\n") == 1, result.stderr
  for ugly in ("Traceback", "<function", "<module", " at 0x", "configurable", "\\"):
    assert ugly not in result.stderr, result.stderr
  for word in words:
    assert word in result.stderr, result.stderr


def test_experiment_runs_once_without_importing_jax(command):
  result = command("--gin_file=work.gin", OUT)
  assert (result.returncode, result.stdout, result.stderr) == (0, "gamma 4, jax False\n", "")
  assert (command.dir / "out" / "out.txt").read_text() == "gamma 4\n"


@pytest.mark.parametrize(
  "args, gamma",
  [
    (["--gin.GAMMA=7"], 7),
    (["--gin_bindings=GAMMA = 8"], 8),
    (["--gin_bindings", "tiny_work.work.gamma = 9"], 9),
    (["--gin.tiny_work.work.gamma=2", "--gin.work.gamma=3"], 3),
    (["--gin_file=later.gin"], 6),
    (["--gin_file=later.gin", "--gin.GAMMA=7"], 7),
    (["--gin.NEW=5", "--gin.GAMMA=%NEW"], 5),
    (["--gamma", "2"], 2),
    (["--gamma=2", "--output-dir", "a b/c.txt"], 2),
    (["--GAMMA", "auto"], "auto"),
    (["--gin.GAMMA=some/path.txt"], "some/path.txt"),
    (["--gamma", "(3, 5)"], "(3, 5)"),
    (["--gamma", "-1"], -1),
    (["--gamma="], ""),
  ],
  ids=str,
)
def test_flags_override_files_and_later_bindings_override_earlier(command, args, gamma):
  (command.dir / "later.gin").write_text("GAMMA = 6\n")
  assert command("--gin_file=work.gin", OUT, *args).stdout.startswith(f"gamma {gamma},")


def test_gin_search_paths_are_searched(command):
  (command.dir / "elsewhere").mkdir()
  (command.dir / "elsewhere" / "far.gin").write_text("include 'work.gin'\nGAMMA = 11\n")
  result = command("--gin_file=far.gin", "--gin_search_paths=nowhere,elsewhere", OUT)
  assert result.stdout.startswith("gamma 11,")


def test_gin_files_of_the_project_are_found_from_any_folder(command):
  # The error is about the binding, so the file was found and parsed.
  assert_input_error(command("--gin_file=gin/quickstart.gin", "--gin.GAMMAS="), "'GAMMAS = '")


def test_names_select_gin_files_of_the_project(command):
  assert_input_error(command("quickstart", "--gin.GAMMAS="), "'GAMMAS = '")
  assert_input_error(
    command("translate", "--gin_file=work.gin", OUT, "--gin.GAMA=3"), "GAMA", "INPUT"
  )


def test_help_lists_every_run(command):
  said = command("--help").stdout
  for path in [ROOT / "gin" / "quickstart.gin", *(ROOT / "gin" / "runs").glob("*.gin")]:
    assert f"\n  {path.stem:<20} {gin_files.summary(path)}\n" in said, path
  assert "--gin_bindings" in said
  assert command("--version").stdout == f"specdec_jax {__version__}\n"


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
  printed = run(
    [sys.executable, "-c", "from specdec_jax import gin_files, machine; print(gin_files.HOME)"]
  )
  assert printed.stdout == f"{tmp_path}/lib/specdec_jax/gin_files\n"
  printed = run([sys.executable, "-c", "from specdec_jax import machine; print(machine.commit())"])
  assert printed.stdout == f"{machine.commit()}\n"
  # table2.gin includes another file.
  result = run([sys.executable, "-m", "specdec_jax.run", "table2", "--gin.GAMMAS="])
  assert result.returncode == 2 and "'GAMMAS = '" in result.stderr


@pytest.mark.parametrize(
  "args, words",
  [
    ([], ["no gin file was given"]),
    (["--gin_file=nosuch.gin"], ["no gin file 'nosuch.gin'"]),
    (["--gin_file=gin/nosuch/nosuch.gin"], ["gin/nosuch/nosuch.gin"]),
    (["--gin_file=work.gin"], ["OUTPUT_DIR has no value"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMA=3"], ["GAMA", "GAMMA, OUTPUT_DIR"]),
    (["--gin_file=work.gin", OUT, "--gin_bindings=GAMA=3"], ["GAMA", "GAMMA, OUTPUT_DIR"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMMA"], ["--gin.GAMMA has no value"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMMA="], ["GAMMA = ", "cannot be read"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMMA=(3"], ["GAMMA = (3", "cannot be read"]),
    (["--gin_file=work.gin", "--gin_bindings=OUTPUT_DIR=a.b"], ["OUTPUT_DIR=a.b", "needs quotes"]),
    (["--gin_file=work.gin", OUT, "--gama", "3"], ["--gama is neither", "did you mean --gamma?"]),
    (["--gin_file=work.gin", OUT, "--gamma"], ["--gamma has no value"]),
    (["--gin_file=work.gin", OUT, "--gin.TARGET=3"], ["setting of gin/models/checkpoints.gin"]),
    (["--gin_file=work.gin", OUT, "--gin.GAMMMA=3"], ["did you mean GAMMA?"]),
    (["--gin_file=work.gin", OUT, "--gin.work.gama=3"], ["'work' has no parameter 'gama'"]),
    (["--gin_file=work.gin", OUT, "--gin.play.gamma=3"], ["uses 'play'", "play.gamma = 3"]),
    (["--gin_file=work.gin", OUT, "--gin_bindings=nonsense"], ["'nonsense'"]),
    (["--gin_fil=work.gin"], ["--gin_fil is not a flag", "did you mean --gin_file?"]),
    (["--gin_file=work.gin", OUT, "gamma=3"], ["'gamma=3' is neither a flag"]),
    (["tranlsate"], ["'tranlsate' is neither a flag", "did you mean translate?"]),
    (
      ["--gin_file=work.gin", OUT, "--gin.GAMMA=%GAMMA"],
      ["the macro GAMMA refers to itself; give"],
    ),
    (
      ["--gin_file=work.gin", OUT, "--gin.NEW=(1, [%GAMMA])", "--gin.GAMMA={'a': %NEW}"],
      [" refers to itself by way of "],
    ),
    (
      ["--gin_file=work.gin", OUT, f"--gin.GAMMA={'[' * 2000}{']' * 2000}"],
      ["GAMMA = [[", "nested"],
    ),
  ],
  ids=lambda value: str(value)[:70],
)
def test_invalid_command_line_is_reported(command, args, words):
  assert_input_error(command(*args), *words)
  assert not (command.dir / "out").exists()


@pytest.mark.parametrize(
  "text, words",
  [
    (HEADER, ["no experiment is bound in bad.gin"]),
    (HEADER + "include 'gone.gin'", ["'gone.gin'", "bad.gin, line 5"]),
    (
      HEADER + "from specdec_jax.nosuch import translate",
      ["'specdec_jax.nosuch' is not installed", "line 5"],
    ),
    (HEADER + "import nonexistent_package", ["'nonexistent_package' is not installed", "line 5"]),
    (HEADER + "from specdec_jax import nosuch", ["'specdec_jax.nosuch'", "line 5"]),
    (HEADER + "run.run.experiment = @tiny_work.play", ["tiny_work has no 'play'", "line 5"]),
    (HEADER + "run.run.experiment = @other.play", ["'other' is not imported", "line 5"]),
    (HEADER + "run.run.experiment = @tiny_work.work()", ["leave out the parentheses"]),
    (HEADER + "run.run.experiment = 3", ["run.run.experiment is 3"]),
    (HEADER + "run.run.experiment = %NOPE", ["NOPE has no value"]),
    (HEADER + "run.run.experiment = @tiny_work.work", ["work needs a value for 'output_dir'"]),
    (HEADER + "run.run.experiment =\n", ["value cannot be read", "bad.gin, line 5"]),
    (HEADER + "run.run.experiment = (\n", ["'bad.gin' cannot be read"]),
    (HEADER + "include 'bad.gin'", ["'bad.gin' cannot be read: it includes itself"]),
    (HEADER + f"run.run.experiment = {'(' * 2000}{')' * 2000}", ["'bad.gin'", "nested"]),
    (HEADER + "A = %B\nB = %A\nrun.run.experiment = @tiny_work.work", ["itself by way of"]),
    (HEADER + "run.run.experimnt = 3", ["'run.run' has no parameter 'experimnt'", "line 5"]),
  ],
  ids=lambda value: value.splitlines()[-1][:60] if isinstance(value, str) else "",
)
def test_invalid_gin_file_is_reported(command, text, words):
  (command.dir / "bad.gin").write_text(text)
  assert_input_error(command("--gin_file=bad.gin"), *words)


def test_gin_files_that_include_each_other_are_reported(command):
  (command.dir / "a.gin").write_text("include 'b.gin'")
  (command.dir / "b.gin").write_text("include 'a.gin'")
  assert_input_error(command("--gin_file=a.gin"), "'a.gin' cannot be read: it includes itself")


def test_input_errors_print_one_line(command):

  def faulty(fault):
    return command("--gin_file=work.gin", OUT, f"--gin.work.fault='{fault}'")

  assert faulty("input").stderr == "error: gamma is 0; a round needs at least 1 guess.\n"
  assert_input_error(faulty("gone"), "'/nonexistent/model.json'", "No such file")
  assert_input_error(faulty("module"), "'nonexistent_package' is not installed")


def test_output_dir_that_cannot_be_created_is_reported(command):
  assert_input_error(
    command("--gin_file=work.gin", "--gin.OUTPUT_DIR='work.gin/out'"), "work.gin/out"
  )


@pytest.mark.parametrize(
  "name, words",
  [("o\\0", "a file or folder has a NUL character"), ("o\\ud800", "half a surrogate pair, U+D800")],
)
def test_output_dir_with_an_invalid_name_is_reported(command, name, words):
  result = command("--gin_file=work.gin", f"--gin.OUTPUT_DIR='{name}'")
  assert result.returncode == 2
  assert result.stderr.startswith("error: ") and words in result.stderr
  assert result.stderr.count("\n") == 1


def test_bugs_keep_their_traceback(command):
  result = command("--gin_file=work.gin", OUT, "--gin.work.fault='bug'")
  assert result.returncode == 1
  assert "Traceback" in result.stderr and "tiny_work.py" in result.stderr
  assert "operands could not be broadcast" in result.stderr

  (command.dir / "tiny_work.py").write_text("import specdec_jax.nosuch_module_of_ours\n")
  result = command("--gin_file=work.gin", OUT)
  assert result.returncode == 1 and "Traceback" in result.stderr

  (command.dir / "tiny_work.py").write_text("def work(:\n")
  result = command("--gin_file=work.gin", OUT)
  assert result.returncode == 1 and "SyntaxError" in result.stderr


def test_debug_prints_the_traceback_of_input_errors(command):
  result = command("--gin_file=work.gin", OUT, "--gin.work.fault='input'", "--debug")
  assert result.returncode == 2
  assert "Traceback" in result.stderr and "tiny_work.py" in result.stderr
  assert result.stderr.splitlines()[-1].startswith("error: gamma is 0")


def test_keyboard_interrupt_exits_with_status_130(command):
  result = command("--gin_file=work.gin", OUT, "--gin.work.fault='interrupt'")
  assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_closed_standard_streams(command):
  """No opened file gets the descriptor of a closed stream, and a closed output is an error."""
  (command.dir / "open.gin").write_text(HEADER + "run.run.experiment = @tiny_work.open_something")
  result = command("--gin_file=open.gin", closed="<&- 2>&-")
  assert result.returncode == 0 and int(result.stdout.removeprefix("descriptor ")) > 2
  result = command("--gin_file=gone.gin", closed="2>&-")
  assert (result.returncode, result.stdout, result.stderr) == (2, "", "")
  assert_input_error(command("--gin_file=work.gin", OUT, closed=">&-"), "standard output is closed")
  assert not (command.dir / "out").exists()


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


def test_help_lists_the_flags(command):
  result = command("-h")
  assert result.returncode == 0 and "--gin_search_paths" in result.stdout


def test_help_of_a_run_explains_its_settings(command):
  result = command("speedup", "--help")
  assert result.returncode == 0 and not result.stderr
  said = " ".join(result.stdout.split())
  assert "--gammas numbers of draft tokens per round to measure; " in said
  assert "(default: (3, 5, 7))" in said
  assert "Your own models (gin/models/checkpoints.gin): --target, --draft, " in said


@pytest.mark.parametrize("name, path", gin_files.runs().items())
def test_every_setting_of_a_run_has_a_default(name, path):
  found = run_settings.settings([str(path)])
  assert found and all(each.default for each in found.values())
  text = run_settings.help_text([str(path)])
  assert all(f"\n  {each.flag} " in text for each in found.values())


def test_beginning_of_a_name_selects_a_run():
  assert gin_files.find_run("check") == str(gin_files.runs()["check_exactness"])
  with pytest.raises(InputError, match="did you mean"):
    gin_files.find_run("tabl")  # table2 to table5


def test_flags_of_checkpoints_add_their_gin_file(command):
  result = command("translate", "--input", "-", "--target", "here/gone/x", "--draft=gone")
  assert_input_error(result, "There is no model in here/gone/x")


def test_completion_lists_the_runs(command):
  script = command("--completion").stdout
  completed = subprocess.run(
    ["bash", "-c", script + "COMP_WORDS=(specdec speed) COMP_CWORD=1; _specdec; echo $COMPREPLY"],
    capture_output=True,
    text=True,
  )
  assert completed.stdout == "speedup\n" and not completed.stderr


def test_installed_command_finds_modules_of_the_current_folder(command, tmp_path):
  script = tmp_path / "bin" / "specdec"
  script.parent.mkdir()
  script.write_text("from specdec_jax.run import command\ncommand()\n")
  result = subprocess.run(
    [sys.executable, str(script), "--gin_file=work.gin", OUT],
    cwd=command.dir,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert result.stdout == "gamma 4, jax False\n", result.stderr


def test_compiled_programs_are_cached_in_the_given_folder(command):
  (command.dir / "compile.gin").write_text(
    HEADER + "run.run.experiment = @tiny_work.compile_something"
  )
  at_once = dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
  assert command("--gin_file=compile.gin", **at_once).returncode == 0
  assert list((command.dir / "cache").iterdir())
  result = command("--gin_file=compile.gin", "--jax_compilation_cache_dir=other", **at_once)
  assert result.returncode == 0
  assert list((command.dir / "other").iterdir())


def test_xla_flags_are_tried_once_and_reported_if_xla_rejects_them(command):
  (command.dir / "uses_jax.gin").write_text(f"{HEADER}\nimport jax\n")

  def run_with(**environment):
    return command("--gin_file=work.gin", "--gin_file=uses_jax.gin", OUT, **environment)

  assert_input_error(
    run_with(XLA_FLAGS="--xla_no_such_flag=1 --xla_backend_optimization_level=0"),
    "XLA_FLAGS is '--xla_no_such_flag=1 --xla_backend_optimization_level=0', which XLA rejects:",
    "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1; correct it or unset it.",
  )
  assert not [*command.dir.glob("cache/xla_flags-*")]
  for _ in range(2):
    result = run_with(XLA_FLAGS="--xla_backend_optimization_level=0")
    assert (result.returncode, result.stderr) == (0, "")
    assert len([*command.dir.glob("cache/xla_flags-*")]) == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_missing_platform_is_reported(command, platform):
  (command.dir / "jax.gin").write_text(
    f"{HEADER}\nrun.run.experiment = @tiny_work.compile_something\n"
  )
  result = command("--gin_file=jax.gin", JAX_PLATFORMS=platform)
  assert result.returncode == 2, result
  error = result.stderr.splitlines()[-1]  # libtpu, if installed, prints lines before it
  assert error.startswith(f"error: JAX_PLATFORMS is '{platform}', which jax cannot use here"), (
    result
  )
  assert error.endswith("; unset it, or name a platform that this machine has.")


def test_compilation_cache_that_cannot_be_created_is_a_warning(command):
  result = command("--gin_file=work.gin", OUT, "--jax_compilation_cache_dir=work.gin/cache")
  assert result.returncode == 0
  assert result.stderr.startswith("warning: compiled programs are not cached")
