"""The edge: `specdec quickstart`, or `python -m specdec_jax.run --gin_file=gin/quickstart.gin`.

The only module that parses flags or gin. It runs what gin files describe; one binds what to do:

    from __gin__ import dynamic_registration
    from specdec_jax import run
    from specdec_jax.commands import quickstart

    run.run.experiment = @quickstart.quickstart
    quickstart.quickstart.gammas = (3, 5)

jax is imported only by what the gin files name, so that a mistyped flag is answered at once.
"""

import functools
import graphlib
import os
import re
import signal
import sys
import tokenize
import traceback
from collections.abc import Callable, Sequence

import gin
from absl import flags

from specdec_jax import gin_files, interrupt
from specdec_jax.compile_cache import check_xla_flags, default_cache_dir, keep_compiled
from specdec_jax.errors import InputError
from specdec_jax.sentences import plainer, user_sentence
from specdec_jax.version import __version__

_MACRO = "gin.macro"


def run(experiment: Callable[[], object]) -> None:
  """Call `experiment` once. Gin files bind it: `run.run.experiment = @module.function`.

  Raises:
    InputError: `experiment` is not a function.
  """
  if not callable(experiment):
    raise InputError(
      f"run.run.experiment is {experiment!r}; bind it to a function, as in @module.function, "
      "without parentheses."
    )
  experiment()


def main(argv: Sequence[str]) -> int:
  """Run what the command line says; see the module's docstring.

  Args:
    argv: the program's name; names of gin files that come with the project (`gin_files.runs`); and
      flags as t5x has them: --gin_file (repeated), --gin_bindings (repeated), --gin.NAME=VALUE,
      --gin_search_paths, --jax_compilation_cache_dir, --debug.

  Returns:
    Exit status: 0; 2 for bad input, with one line on stderr; 130 after SIGINT and 143 after
    SIGTERM (`interrupt`). Anything else is a bug and raised.
  """
  try:
    _fill_closed_streams()
    options = _parse_flags(argv)
    if options.help:
      print("usage: specdec NAME [flags], or python -m specdec_jax.run --gin_file=FILE [flags]\n")
      for name, path in gin_files.runs().items():
        print(f"  {name:<20} {gin_files.summary(path)}")
      print(options.module_help(__name__))
      return 0
    if options.version:
      print(f"specdec_jax {__version__}")
      return 0
    keep_compiled(options.jax_compilation_cache_dir)
    parse_gin(options.gin_file, options.gin_bindings, options.gin_search_paths)
    if "jax" in sys.modules:
      check_xla_flags()
    gin.get_configurable(run)()
    sys.stdout.flush()
    return 0
  except KeyboardInterrupt as error:
    number = getattr(error, "number", signal.SIGINT)
    print("interrupted" if number == signal.SIGINT else "terminated", file=sys.stderr)
    return 128 + number
  except BrokenPipeError:  # whoever read our output has enough, as `| head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    sentence = user_sentence(error)
    if sentence is None:
      raise
    if "--debug" in argv:
      traceback.print_exc()
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def _fill_closed_streams() -> None:
  """Put the null device where a standard stream is closed, so that no file opened later takes it.

  Raises:
    InputError: it is that of output, which would be lost.
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
  define("gin_file", help="What to run. Repeat it to add files; later ones win.")
  define("gin_bindings", help="A setting, as 'module.function.name = value'; wins over files.")
  flags.DEFINE_list(
    "gin_search_paths",
    [],
    "Folders to look for gin files in, after the current one and before this project's own.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "jax_compilation_cache_dir",
    default_cache_dir(),
    "Where compiled programs are kept between runs; empty keeps none.",
    flag_values=values,
  )
  flags.DEFINE_bool("debug", False, "Show the traceback of bad input too.", flag_values=values)
  flags.DEFINE_bool("help", False, "Show what can be run, and these flags.", flag_values=values)
  flags.DEFINE_bool("version", False, "Show the version.", flag_values=values)
  try:
    rest = values([_as_binding(arg) for arg in argv])
  except flags.Error as error:
    raise InputError(f"{str(error).rstrip('.')}; --help lists them.") from error
  values["gin_file"].value = [*map(gin_files.named, rest[1:]), *values.gin_file]
  if not (values.gin_file or values.help or values.version):
    raise InputError("no gin file was given; try quickstart, or --help.")
  return values


def _as_binding(arg: str) -> str:
  """--gin.NAME=VALUE is short for --gin_bindings='NAME = VALUE'."""
  if not arg.startswith("--gin."):
    return arg
  name, equals, value = arg.removeprefix("--gin.").partition("=")
  if not (name and equals):
    raise InputError(f"{arg} has no value; write --gin.NAME=VALUE.")
  return f"--gin_bindings={name} = {value}"


def parse_gin(files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]) -> None:
  """Read gin files, then bindings, and check that every name in them means something."""
  # gin would look for a file inside Python packages too, importing them on the way.
  del gin.config._FILE_READERS[1:]
  for path in (*search_paths, str(gin_files.HOME)):
    gin.add_config_file_search_path(path)
  source = ""
  try:
    for source in files:
      gin.parse_config_file(source)
    # gin itself takes any macro: a mistyped one would be set and never read.
    named = (re.match(r"\s*([\w/]+)\s*=", binding) for binding in bindings)
    new_macros = {name[1] for name in named if name and not _is_macro(name[1])}
    gin.config.register_finalize_hook(functools.partial(_check_macros, new_macros))
    gin.config.register_finalize_hook(_check_cycles)
    for source in bindings:
      gin.parse_config(source)
    gin.finalize()
  except UnicodeDecodeError as error:
    raise InputError(f"'{source}', or a file that it includes, is not UTF-8 text.") from error
  except (tokenize.TokenError, SyntaxError) as error:
    if getattr(error, "filename", None):
      raise  # it names the place
    raise InputError(f"'{source:.100}' cannot be read: {plainer(error.args[0])}.") from error
  except RecursionError as error:
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    included = frames.count(gin.parse_config_file.__code__) > 20
    why = "it includes itself" if included else "its brackets are nested too deeply"
    raise InputError(f"'{source:.100}' cannot be read: {why}.") from None
  try:
    experiment = gin.query_parameter("specdec_jax.run.run.experiment")
  except ValueError:
    raise InputError(
      f"{', '.join(files)} says nothing to run; bind run.run.experiment = @module.function."
    ) from None
  # With () gin would run the experiment first, and hand us its result.
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
  """Macros that only flags set, `new_macros`, must be read; gin checks that those read are set."""
  keys = [reference.config_key for reference in gin.config.iterate_references(config)]
  read = sorted({scope for scope, selector in keys if selector == _MACRO})
  for name in sorted(new_macros.difference(read)):
    raise InputError(
      f"no gin file uses a macro {name}; those in use are {', '.join(read) or 'none'}."
    )


def _check_cycles(config) -> None:
  """No macro may refer to itself, directly or by way of others."""
  references = gin.config.iterate_references
  macros = {
    scope: {found.config_key[0] for found in references(bound) if found.config_key[1] == _MACRO}
    for (scope, selector), bound in config.items()
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
  """The command `specdec`."""
  with interrupt.handled():
    status = main(sys.argv)
  sys.exit(status)


if __name__ == "__main__":
  # As __main__ this would be a second module, and gin files name the first.
  from specdec_jax.run import command as _command

  _command()
