"""Command line: `specdec quickstart`, or `python -m specdec_jax.run --gin_file=gin/quickstart.gin`.

This is the only module that parses flags or gin files. A gin file binds the experiment to run and
the arguments of the experiment:

    from __gin__ import dynamic_registration
    from specdec_jax import run
    from specdec_jax.commands import quickstart

    run.run.experiment = @quickstart.quickstart
    quickstart.quickstart.gammas = (3, 5)

This module does not import jax, so that a mistyped flag is reported without delay. The modules that
gin files name import it.
"""

import difflib
import functools
import graphlib
import os
import re
import signal
import sys
import tokenize
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gin
from absl import flags

from specdec_jax import __version__, gin_files, interrupt, run_settings
from specdec_jax.errors import InputError
from specdec_jax.user_errors import format_error, simplify_gin_message
from specdec_jax.xla import check_xla_flags, default_cache_dir, enable_compile_cache

_MACRO = "gin.macro"
_COMPLETION = """\
# For bash, in ~/.bashrc: eval "$(specdec --completion)". zsh also needs, before it:
# autoload -U +X bashcompinit && bashcompinit
_specdec() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [[ $COMP_CWORD == 1 && $word != -* ]]; then
    COMPREPLY=($(compgen -W "{names}" -- "$word"))
  elif [[ $word == -* ]]; then
    local flags="$(specdec "${{COMP_WORDS[1]}}" --help | grep -o '^ *--[a-z_]*')"
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _specdec specdec
"""


def run(experiment: Callable[[], object]) -> None:
  """Call `experiment` once. Gin files bind this argument: `run.run.experiment = @module.function`.

  Raises:
    InputError: `experiment` is not a function.
  """
  if not callable(experiment):
    raise InputError(
      f"run.run.experiment is {experiment!r}; bind it to a function, as in @module.function, "
      "without parentheses."
    )
  experiment()


class Macro:
  """Macro of the gin configuration, as a picklable function that returns its value.

  Another process parses the configuration when it first calls the function. The `repr` has all
  bindings that the value depends on.
  """

  def __init__(self, name: str):
    self._reference, self._config = f"{name}/{_MACRO}", gin.config_str()
    self._bindings: dict[str, dict] = {}
    references = [self._reference]
    for reference in references:
      if reference not in self._bindings:
        found = gin.get_bindings(reference, resolve_references=False)
        self._bindings[reference] = {key: repr(value) for key, value in sorted(found.items())}
        references += [each.scoped_selector for each in gin.config.iterate_references(found)]

  def __call__(self) -> Any:
    if not gin.config_is_locked():  # this process has not parsed the gin files
      gin.parse_config(self._config)
    return gin.get_configurable(self._reference)()

  def __repr__(self) -> str:
    return repr(self._bindings)


def main(argv: Sequence[str]) -> int:
  """Parse the command line and run the experiment that the gin files bind.

  Args:
    argv: name of the program; names of the project's runs (`gin_files.runs`), or one run that takes
      names (`gin_files.TAKES_NAMES`) followed by these names; the flags of t5x:
      --gin_file (repeatable), --gin_bindings (repeatable), --gin.NAME=VALUE, --gin_search_paths;
      --jax_compilation_cache_dir, --debug, --help, --completion, --version; and settings of the run
      as flags (`run_settings`).

  Returns:
    Exit status: 0 for success; 2 for invalid input, with a one-line error on stderr; 130 after
    SIGINT, 143 after SIGTERM (`interrupt`); 141 if the reader of standard output has closed it. Any
    other exception is a bug and is raised.
  """
  try:
    _fill_closed_streams()
    options = _parse_flags(argv)
    if options.help:
      print(_help(options))
      return 0
    if options.completion:
      print(_COMPLETION.format(names=" ".join(gin_files.runs())), end="")
      return 0
    if options.version:
      print(f"specdec_jax {__version__}")
      return 0
    enable_compile_cache(options.jax_compilation_cache_dir)
    parse_gin(options.gin_file, options.gin_bindings, options.gin_search_paths)
    if "jax" in sys.modules:
      check_xla_flags()
    _announce(options.gin_file)
    gin.get_configurable(run)()
    sys.stdout.flush()
    return 0
  except KeyboardInterrupt as error:
    interrupt.stop_raising()
    number = getattr(error, "number", signal.SIGINT)
    print("interrupted" if number == signal.SIGINT else "terminated", file=sys.stderr)
    return 128 + number
  except BrokenPipeError:  # the reader of standard output has closed it, as `| head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    message = format_error(error)
    if message is None:
      raise
    if "--debug" in argv:
      traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return 2


def _announce(files: Sequence[str]) -> None:
  """Print a summary of the run on standard error if it measures models, before it loads them."""
  for name, path in gin_files.runs().items():
    if str(path) in files and gin_files.measures(name):
      message = f"{name}: {gin_files.summary(path)}. Loading the models."
      print(message, file=sys.stderr, flush=True)


def _fill_closed_streams() -> None:
  """Open the null device in place of closed standard streams.

  Otherwise a file that is opened later could get the descriptor of a standard stream.

  Raises:
    InputError: standard output is closed, so the output would be lost.
  """
  while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass
  os.close(lowest)
  if sys.stderr is None:
    sys.stderr = open(2, "w")
  if sys.stdout is None:
    raise InputError("standard output is closed; open it, or end the command in >/dev/null.")


def _parse_flags(argv: Sequence[str]) -> flags.FlagValues:
  values = flags.FlagValues()
  define = functools.partial(flags.DEFINE_multi_string, default=[], flag_values=values)
  define("gin_file", help="Gin file to run. Repeat the flag to add files; later bindings win.")
  define("gin_bindings", help="A setting, 'module.function.name = value'; overrides files.")
  flags.DEFINE_list(
    "gin_search_paths",
    [],
    "Folders to search for gin files, after the current folder and before this project's.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "jax_compilation_cache_dir",
    default_cache_dir(),
    "Folder of the cache of compiled programs; an empty string disables the cache.",
    flag_values=values,
  )
  flags.DEFINE_bool("debug", False, "Print the traceback of input errors too.", flag_values=values)
  define_bool = functools.partial(flags.DEFINE_bool, default=False, flag_values=values)
  define_bool("help", help="Print all runs, or the settings of the given one.", short_name="h")
  define_bool("completion", help="Print a script that completes runs and flags in bash and zsh.")
  flags.DEFINE_bool("version", False, "Print the version.", flag_values=values)
  arguments = run_settings.flags_to_bindings(argv[1:], set(values))
  try:
    rest = values([argv[0], *arguments])
  except flags.Error as error:
    raise InputError(f"{str(error).rstrip('.')}; --help lists them.") from error
  values["gin_file"].value = [*map(gin_files.find_run, rest[1:]), *values.gin_file]
  if not (values.gin_file or values.help or values.version or values.completion):
    raise InputError("no gin file was given; try quickstart, or --help.")
  return values


def _help(options: flags.FlagValues) -> str:
  """Return the help of the given runs; if no run is given, return a list of all runs and flags."""
  usage = "usage: specdec NAME [flags], or python -m specdec_jax.run --gin_file=FILE [flags]"
  if options.gin_file:
    return f"{usage}\n\n{run_settings.help_text(options.gin_file)}"
  lines = [usage, "       specdec NAME --help prints the settings of a run"]
  for purpose, found in gin_files.groups().items():
    lines += ["", f"{purpose}:"]
    lines += [f"  {name:<20} {gin_files.summary(path)}" for name, path in found.items()]
  return "\n".join([*lines, options.module_help(__name__)])


def parse_gin(files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]) -> None:
  """Parse gin files, then bindings, and check their macros and the experiment that they bind.

  Args:
    files: gin files, in this order.
    bindings: bindings 'name = value', which override the bindings in the files.
    search_paths: folders to search for gin files.

  Raises:
    InputError: a file or binding cannot be parsed, no file uses a macro that a binding sets, a
      macro refers to itself, or the experiment is not bound or is bound with parentheses.
  """
  # gin would search for files inside Python packages too, and import those packages.
  del gin.config._FILE_READERS[1:]
  for path in (*search_paths, str(gin_files.HOME)):
    gin.add_config_file_search_path(path)
  source = ""
  try:
    for source in files:
      gin.parse_config_file(source)
    # gin accepts a binding of any macro, so a mistyped name would be set and never read.
    matches = (re.match(r"\s*([\w/]+)\s*=", binding) for binding in bindings)
    new_macros = {match[1] for match in matches if match and not _is_macro(match[1])}
    gin.config.register_finalize_hook(functools.partial(_check_macros, new_macros))
    gin.config.register_finalize_hook(_check_cycles)
    for source in bindings:
      gin.parse_config(source)
    gin.finalize()
  except UnicodeDecodeError as error:
    raise InputError(f"'{source}', or a file that it includes, is not UTF-8 text.") from error
  except (tokenize.TokenError, SyntaxError) as error:
    if getattr(error, "filename", None):
      raise  # the error names the file and line
    raise InputError(
      f"'{source:.100}' cannot be read: {simplify_gin_message(error.args[0])}."
    ) from error
  except RecursionError as error:
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    included = frames.count(gin.parse_config_file.__code__) > 20
    reason = "it includes itself" if included else "its brackets are nested too deeply"
    raise InputError(f"'{source:.100}' cannot be read: {reason}.") from None
  try:
    experiment = gin.query_parameter("specdec_jax.run.run.experiment")
  except ValueError:
    raise InputError(
      f"no experiment is bound in {', '.join(files)}; bind run.run.experiment = @module.function."
    ) from None
  # For a reference with (), gin would call the experiment and bind its result.
  is_reference = isinstance(experiment, gin.config.ConfigurableReference)
  if is_reference and experiment.evaluate and experiment.config_key[1] != _MACRO:
    raise InputError(f"run.run.experiment is {experiment!r}; leave out the parentheses.")


def _is_macro(name: str) -> bool:
  try:
    gin.query_parameter(f"%{name}")
  except ValueError:
    return False
  return True


def _check_macros(new_macros: set[str], config) -> None:
  """Raise InputError unless every macro that only flags set (`new_macros`) is used.

  gin itself checks that every macro that is used has a value.
  """
  keys = [reference.config_key for reference in gin.config.iterate_references(config)]
  used = sorted({scope for scope, selector in keys if selector == _MACRO})
  for name in sorted(new_macros.difference(used)):
    files = run_settings.files_with(name)
    near = difflib.get_close_matches(name, used, 1)
    if files:
      hint = f"it is a setting of {', '.join(files)}, which --gin_file adds"
    else:
      hint = f"did you mean {near[0]}?" if near else ""
    raise InputError(
      f"no gin file of this run uses a macro {name}; those in use are {', '.join(used) or 'none'}"
      f"{f'; {hint}' if hint else ''}{'' if hint.endswith('?') else '.'}"
    )


def _check_cycles(config) -> None:
  """Raise InputError if a macro refers to itself, directly or indirectly."""
  references = gin.config.iterate_references
  macros = {
    scope: {ref.config_key[0] for ref in references(value) if ref.config_key[1] == _MACRO}
    for (scope, selector), value in config.items()
    if selector == _MACRO
  }
  try:
    graphlib.TopologicalSorter(macros).prepare()
  except graphlib.CycleError as error:
    *names, _ = error.args[1]
    raise InputError(
      f"the macro {names[0]} refers to itself{' by way of '.join(['', *names[:0:-1]])}; give it a "
      "value."
    ) from None


def command() -> None:
  """Run the command `specdec` and exit with its status."""
  if not {"", os.getcwd()} & set(sys.path):
    sys.path.insert(0, "")  # modules of the current folder are found, as with `python -m`
  with interrupt.handle_signals():
    status = main(sys.argv)
  sys.exit(status)


if __name__ == "__main__":
  # Gin files name the module specdec_jax.run, which is not the same object as __main__.
  from specdec_jax.run import command as _command

  _command()
