"""The edge: `specdec quickstart`, or `python -m specdec_jax.run --gin_file=gin/quickstart.gin`.

The only module that parses flags or gin. It runs what gin files describe; one binds what to do:

    from __gin__ import dynamic_registration
    from specdec_jax import run
    from specdec_jax.commands import quickstart

    run.run.experiment = @quickstart.quickstart
    quickstart.quickstart.gammas = (3, 5)

jax is imported only by what the gin files name, so that a mistyped flag is answered at once.
"""

import errno
import functools
import os
import pathlib
import re
import signal
import sys
import tokenize
import traceback
from collections.abc import Callable, Sequence

import gin
from absl import flags

from specdec_jax import gin_files
from specdec_jax.compile_cache import keep_compiled, kept_in
from specdec_jax.errors import InputError
from specdec_jax.version import __version__

_MENDABLE = (
  *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
  *(errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EFBIG, errno.EBUSY),
  *(errno.ELOOP, errno.ENXIO, errno.ETXTBSY, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
)
_MACRO = "gin.macro"
_UNSET = r"has no value; set it with --gin.\1=VALUE"
_QUOTES = """text needs quotes of its own, as in '"text"'"""

# gin's messages, shortened to what its user can act on.
_PLAINER = (
  (r"Unable to open file: (.*)\. Searched .*\['', (.*)\]\.", r"no gin file '\1' here or in \2"),
  (r"Unable to open file: (.*)\. Searched .*", r"no gin file '\1'"),
  (r"No configurable matching (?:reference )?'@?(.*?)'\..*", r"no gin file imports and uses '\1'"),
  (r"Configurable '(.*)' doesn't have a parameter named '(.*)'.*", r"'\1' has no parameter '\2'"),
  (r"'(.*)' was not provided by an import statement.*", r"'\1' is not imported in that gin file"),
  (r"Couldn't resolve selector .*; <module '(\S+)'.*> has no attribute (\w+).*", r"\1 has no '\2'"),
  (r"No bindings specified for '(.*?)/gin\.macro' .*", rf"\1 {_UNSET}"),
  (r"(\S+)/(?:gin\.)?macro\.value set to `%gin.REQUIRED` .*", rf"\1 {_UNSET}"),
  (r"(\S+) set to `%gin.REQUIRED` .*", rf"\1 {_UNSET}"),
  (r"(\w+)\(\) missing .* argument.*: (.*)", r"\1 needs a value for \2; bind it in a gin file"),
  (r"No module named '(.*?)'.*", r"the Python module '\1' is not installed"),
  (r".* Failed to parse token '(.*)'", rf"\1 is not a value; {_QUOTES}"),
  (r"Unable to parse value\.", f"the value cannot be read; {_QUOTES}"),
)


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
    Exit status: 0; 2 for bad input, told in one sentence on stderr; 130 if interrupted. Anything
    else is a bug and raised.
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
    gin.get_configurable(run)()
    sys.stdout.flush()
    return 0
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
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
    kept_in(),
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
    for source in bindings:
      gin.parse_config(source)
    gin.finalize()
  except UnicodeDecodeError as error:
    raise InputError(f"'{source}', or a file that it includes, is not UTF-8 text.") from error
  except (tokenize.TokenError, SyntaxError) as error:
    if getattr(error, "filename", None):
      raise  # it names the place
    raise InputError(f"'{source}' cannot be read: {_plainer(error.args[0])}.") from error
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


def user_sentence(error: BaseException) -> str | None:
  """What to tell the user of an error that is theirs to mend; None for a bug."""
  text = str(error)
  # gin adds to a message by raising a copy, of a subclass made for it; find what was raised first.
  while error.__context__ and type(error).__base__ is type(error.__context__):
    error = error.__context__
  if isinstance(error, InputError):
    return " ".join(str(error).split())
  if isinstance(error, OSError) and error.errno is not None:
    return _os_sentence(error) if error.errno in _MENDABLE else None
  if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
    detail = str(error).removeprefix("RESOURCE_EXHAUSTED:").strip().partition("\n")[0].rstrip(".")
    return f"there is not enough memory{detail and ': '}{detail}; ask for less."
  if isinstance(error, FileNotFoundError):
    return " ".join(str(error).split())
  if isinstance(error, ModuleNotFoundError):
    ours = (error.name or "").startswith("specdec_jax") and not _raised_in_gin(error)
    return None if ours else _gin_sentence(_moved(text))
  if isinstance(error, SyntaxError):
    of_gin = not (error.filename or "").endswith(".py")
    line = f"\n  In file {error.filename!r}, line {error.lineno}\n{error.text or ''}"
    return _gin_sentence((error.msg or "it cannot be read") + line) if of_gin else None
  return _gin_sentence(text) if _raised_in_gin(error) else None


def _moved(text: str) -> str:
  """gin's message of a missing module; of one of ours that was moved, where it is now."""
  named = re.search(r"^\s*(?:from (specdec_jax[.\w]*) )?import ([.\w]+)", text, re.MULTILINE)
  old = ".".join(filter(None, named.groups())) if named else ""
  package = pathlib.Path(__file__).resolve().parent
  found = [*package.rglob(f"{old.rpartition('.')[2]}.py")]
  if not old.startswith("specdec_jax.") or len(found) != 1:
    return text
  now = found[0].relative_to(package.parent).with_suffix("").as_posix().replace("/", ".")
  return re.sub(r"No module named '\S+?'", f"{old} is now {now}; change the gin file", text)


def _os_sentence(error: OSError) -> str:
  name = "the disk" if error.filename is None else f"'{error.filename}'"
  return f"cannot use {name}: {error.strerror}."


def _raised_in_gin(error: BaseException) -> bool:
  frames = list(traceback.walk_tb(error.__traceback__))
  return bool(frames) and frames[-1][0].f_globals["__name__"].partition(".")[0] == "gin"


def _gin_sentence(text: str) -> str:
  """gin's message and the place it names, in one sentence."""
  message = re.split(r"\n\s*(?:In |No values)", text, maxsplit=1)[0]
  place = ""
  if file := re.search(r"""In file ["'](.*?)["'], line (\d+)\s*(.*)""", text):
    line = "".join(filter(str.isprintable, file[3])).strip()  # a binary file may be anything
    place = f" ({file[1]}, line {file[2]}: {line})"
  elif binding := re.search(r"In bindings string line \d+\s*(.*)", text):
    place = f" (on the command line: {binding[1].strip()})"
  return f"{_plainer(message)}{place}."


def _plainer(message: str) -> str:
  message = " ".join(message.split())
  for pattern, plain in _PLAINER:
    if re.fullmatch(pattern, message):
      return re.sub(pattern, plain, message)
  return message.rstrip(".")


def command() -> None:
  """The command `specdec`."""
  # As Ctrl-C does, it ends what is under way in order: no half of a file is left.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  sys.exit(main(sys.argv))


if __name__ == "__main__":
  # As __main__ this would be a second module, and gin files name the first.
  from specdec_jax.run import command as _command

  _command()
