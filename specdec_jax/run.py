"""Command line: `specdec quickstart`, or `python -m specdec_jax.run --gin_file=gin/quickstart.gin`.

This is the only module that parses flags or gin files. A gin file binds the experiment to run and
the arguments of the experiment:

    from __gin__ import dynamic_registration
    from specdec_jax import run
    from specdec_jax.commands import quickstart

    run.run.experiment = @quickstart.quickstart
    quickstart.quickstart.gammas = (3, 5)
"""

import ast
import inspect
import os
import shlex
import sys
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence

import gin
from absl import flags

from specdec_jax import __version__, gin_files
from specdec_jax.errors import InputError
from specdec_jax.xla import default_cache_dir, enable_compile_cache

_USAGE = """\
usage: specdec NAME [flags], or python -m specdec_jax.run --gin_file=FILE [flags]
       specdec NAME --help prints the settings of a run
"""
_CHECKPOINTS = "gin/models/checkpoints.gin"  # parsed if a flag sets one of its macros, below
_CHECKPOINT_MACROS = {"TARGET", "DRAFT", "VOCABULARY", "EXTRA_IDS", "DTYPE"}


def run(experiment: Callable[[], object]) -> None:
  """Call `experiment`. Gin files bind this argument: `run.run.experiment = @module.function`."""
  experiment()


def main(argv: Sequence[str]) -> int:
  """Parse the command line and run the experiment that the gin files bind.

  Args:
    argv: name of the program; name of a run (`gin_files.runs`), which values of its setting NAMES
      may follow; flags. A flag that `_flags` does not define sets a macro (`to_bindings`).

  Returns:
    Exit status: 0 for success; 2 for an InputError or OSError, with a message on stderr; 130 after
    Ctrl-C; 141 if the reader of standard output has closed it.
  """
  warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
  try:
    values = _flags()
    names, bindings = to_bindings(values(argv, known_only=True)[1:])
    files = [str(gin_files.find_run(name)) for name in names[:1]] + values.gin_file
    if values.version:
      print(f"specdec_jax {__version__}")
    elif values.help or len(argv) == 1:
      print(_help_of_run(files, values) if files else _help(values))
    elif not files:
      raise InputError("no run was given; try quickstart, or --help.")
    else:
      if names[1:]:
        bindings.insert(0, f"NAMES = {tuple(names[1:])!r}")
      enable_compile_cache(values.jax_compilation_cache_dir)
      parse_gin(files, [*values.gin_bindings, *bindings], values.gin_search_paths)
      gin.get_configurable(run)()
    sys.stdout.flush()
    return 0
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # the reader of standard output has closed it, as `| head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except (InputError, OSError, flags.Error) as error:
    if "--debug" in argv:
      traceback.print_exc()
    message = str(error).partition("\n  In call to configurable")[0]  # gin adds the rest
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _flags() -> flags.FlagValues:
  values = flags.FlagValues()
  for name, text in (
    ("gin_file", "Gin file to run. Repeat the flag to add files; later bindings win."),
    ("gin_bindings", "A binding, 'module.function.name = value'; it overrides files."),
  ):
    flags.DEFINE_multi_string(name, [], text, flag_values=values)
  text = "Folders to search for gin files, after the current folder and before this project's."
  flags.DEFINE_list("gin_search_paths", [], text, flag_values=values)
  text = "Folder of the cache of compiled programs; an empty string disables the cache."
  cache_dir = default_cache_dir()
  flags.DEFINE_string("jax_compilation_cache_dir", cache_dir, text, flag_values=values)
  for name, short, text in (
    ("help", "h", "Print all runs, or the settings of the given run."),
    ("version", None, "Print the version."),
    ("debug", None, "Print the traceback of input errors too."),
  ):
    flags.DEFINE_bool(name, False, text, short_name=short, flag_values=values)
  return values


def to_bindings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Split arguments into words and flags, and return the words and the gin bindings of the flags.

  `--num_texts 5`, `--num-texts=5` and `--gin.NUM_TEXTS=5` become `NUM_TEXTS = 5`; `--dry_run` alone
  becomes `DRY_RUN = True`. A value is a string unless it is a Python literal or a gin expression.
  """
  words, bindings, rest = [], [], list(arguments)
  while rest:
    flag, equals, value = rest.pop(0).partition("=")
    if not flag.startswith("--"):
      words.append(flag + equals + value)
      continue
    if not equals:
      value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
    is_macro = not flag.startswith("--gin.")
    name = flag[2:].replace("-", "_").upper() if is_macro else flag.removeprefix("--gin.")
    bindings.append(f"{name} = {_gin_value(value)}")
  return words, bindings


def _gin_value(text: str) -> str:
  if text.startswith(("@", "%", "(", "[", "{", "'", '"')):
    return text
  if text in ("true", "false"):
    return text.title()  # as a string, "false" would be true
  try:
    ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return repr(text)
  return text


def parse_gin(
  files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> None:
  """Parse gin files, then bindings 'name = value', which override those in the files.

  A macro is also the value of the parameter of the run's function that has its name in lower case,
  unless a file binds the parameter. If the files define the macro PAIR, bindings may also set the
  macros of gin/models/checkpoints.gin.

  Raises:
    InputError: a binding is invalid, or sets a macro that no file defines or uses and that is not a
      parameter of the run's function; a required macro has no value.
  """
  _parse_files(files, search_paths)
  names = {binding.partition("=")[0].strip() for binding in bindings}
  if (names - {*macros()}) & _CHECKPOINT_MACROS and "PAIR" in macros():
    gin.parse_config_file(_CHECKPOINTS)
  known = {*macros()}
  try:
    gin.parse_config(bindings)
    selector, parameters = _parameters()
    known |= {name.upper() for name in parameters}
    for name in parameters:
      if name.upper() in macros():
        gin.parse_config(f"{selector}.{name} = %{name.upper()}")
    references = gin.config.iterate_references(gin.config._CONFIG)
    used = {ref.config_key[0] for ref in references if ref.config_key[1] == "gin.macro"}
    known |= used
    if unknown := names & {*macros()} - known:
      raise InputError(f"There is no setting {_as_flags(unknown)}; there are {_as_flags(known)}.")
    if missing := used - {*macros()}:
      raise InputError(f"The gin files need values of {_as_flags(missing)}; give these flags.")
    gin.finalize()
  except (ValueError, SyntaxError, NameError, tokenize.TokenError) as error:
    raise InputError(str(error)) from error


def _parse_files(files: Sequence[str], search_paths: Sequence[str]) -> None:
  del gin.config._FILE_READERS[1:]  # they would search Python packages, and import these
  for folder in (*search_paths, str(gin_files.HOME)):
    gin.add_config_file_search_path(folder)
  for file in files:
    gin.parse_config_file(file)


def _parameters() -> tuple[str, dict[str, inspect.Parameter]]:
  """Return the gin selector of the run's function, and its parameters that no file binds."""
  experiment = gin.get_bindings(run, resolve_references=False).get("experiment")
  if not isinstance(experiment, gin.config.ConfigurableReference):
    return "", {}
  selector = experiment.scoped_selector
  bound = gin.get_bindings(selector, resolve_references=False)
  parameters = inspect.signature(experiment.configurable.wrapped).parameters
  return selector, {name: x for name, x in parameters.items() if name not in bound}


def macros() -> dict[str, object]:
  """Return the macros of the parsed gin files."""
  config = gin.config._CONFIG
  return {name: bound["value"] for (name, kind), bound in config.items() if kind == "gin.macro"}


def _as_flags(names: Iterable[str]) -> str:
  return ", ".join(f"--{name.lower()}" for name in sorted(names))


def _help(values: flags.FlagValues) -> str:
  lines = [_USAGE, "Runs, then studies of the current folder:"]
  for name, path in gin_files.runs().items():
    lines.append(f"  {name:<20} {gin_files.summary(path)}")
  return "\n".join([*lines, values.module_help(__name__)])


def _help_of_run(files: Sequence[str], values: flags.FlagValues) -> str:
  _parse_files(files, values.gin_search_paths)
  lines = [_USAGE, *(gin_files.header(file) for file in files), "", "Settings:"]
  defaults = {name.upper(): x.default for name, x in _parameters()[1].items()}
  for name, value in {**defaults, **macros()}.items():  # as a shell reads them
    text = "(required)" if value is inspect.Parameter.empty else repr(value)
    if inspect.isfunction(value):
      text = f"@{value.__name__}"
    lines.append(f"  --{name.lower()} {shlex.quote(value if type(value) is str else text)}")
  if "PAIR" in macros():
    lines += ["", f"Your own models ({_CHECKPOINTS}): {_as_flags(_CHECKPOINT_MACROS)}"]
  return "\n".join(lines)


def command() -> None:
  """Run the command `specdec` and exit with its status."""
  sys.path.insert(0, "")  # modules of the current folder are found, as with `python -m`
  sys.exit(main(sys.argv))


if __name__ == "__main__":
  # Gin files name the module specdec_jax.run, which is not the same object as __main__.
  from specdec_jax.run import command as _command

  _command()
