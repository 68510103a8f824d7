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
import io
import os
import shlex
import sys
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gin
from absl import flags

from specdec_jax import __version__, flag_values, gin_files, registry
from specdec_jax.core.types import LoadsDraft
from specdec_jax.errors import InputError
from specdec_jax.xla import default_cache_dir, enable_compile_cache

_USAGE = """\
usage: specdec NAME [flags], or python -m specdec_jax.run --gin_file=FILE [flags]
       specdec NAME --help prints the settings of a run
"""
_INVALID = ImportError, NameError, SyntaxError, ValueError, tokenize.TokenError  # of gin
_RUN = "", "specdec_jax.run.run"  # key of gin's configuration, which has a scope
_NAMES = {"draft": registry.DRAFTS, "verifier": registry.VERIFIERS}
_IMPORTS = (  # of the bindings of named drafts and verifiers
  "from __gin__ import dynamic_registration",
  "from specdec_jax import load",
  "from specdec_jax import random_models",
  "from specdec_jax import registry",
)


def run(experiment: Callable[[], object]) -> None:
  """Call `experiment`. Gin files bind this argument: `run.run.experiment = @module.function`."""
  experiment()


def main(argv: Sequence[str]) -> int:
  """Parse the command line and run the experiment that the gin files bind.

  Args:
    argv: name of the program; name of a run (`gin_files.runs`), which values of its setting NAMES
      may follow; flags. A flag that `_flags` does not define is a setting (`to_bindings`).

  Returns:
    Exit status: 0 for success; 2 for an InputError or OSError, with a message on stderr; 130 after
    Ctrl-C; 141 if the reader of standard output has closed it.
  """
  warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
  if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters, as of stderr
    sys.stdout.reconfigure(errors="backslashreplace")
  try:
    values, files, arguments = read_command(argv)
    if values.version:
      print(f"specdec_jax {__version__}")
    elif values.help or len(argv) == 1:
      print(_help_of_run(files, arguments, values) if files else _help(values))
    elif not files:
      raise InputError("no run was given; try quickstart, or --help.")
    else:
      enable_compile_cache(values.jax_compilation_cache_dir)
      parse_files(files, values.gin_search_paths)
      parse_bindings([*values.gin_bindings, *to_bindings(arguments)])
      if _RUN not in gin.config._CONFIG:
        raise InputError(f"No run is in {', '.join(files)}; give one too, as gin/runs/speedup.gin.")
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


def read_command(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str], list[str]]:
  """Return the flags of `_flags`, the gin files, and the arguments for `to_bindings`."""
  values = _flags()
  arguments, files = values(argv, known_only=True)[1:], list(values.gin_file)
  if arguments and not arguments[0].startswith("-"):
    files.insert(0, str(gin_files.find_run(arguments.pop(0))))
  return values, files, arguments


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


def to_bindings(arguments: Sequence[str]) -> list[str]:
  """Return the gin bindings of flags and words, given the parsed files.

  `--num_texts 5`, `--num-texts=5` and `--gin.NUM_TEXTS=5` become `NUM_TEXTS = 5`; a flag alone is
  True. A text that begins with `@` or `%` is a reference or a macro of gin; otherwise, the type of
  the setting tells how it is read (`flag_values.read`). `--gamma 3,5` sets GAMMAS if there is no
  setting GAMMA. `--draft` and `--verifier` take names (`registry`), whose settings are flags too.
  Words are values of the setting NAMES.

  Raises:
    InputError: there is no such setting, its value is of another type, or the run takes no words.
  """
  words, given, bindings = _split(arguments)
  given = {_plural(name): text for name, text in given.items()}
  kinds = _kinds()
  if words and "NAMES" not in kinds:
    raise InputError(f"This run takes no words, and {', '.join(map(repr, words))} is given.")
  if words:
    bindings.append(f"NAMES = {tuple(words)!r}")
  if "PAIR" in macros():
    named = [each for part in _NAMES for each in _take_named(part, given, kinds)]
    bindings += [*_IMPORTS, *named] if named else []
  known = {*kinds, *(part.upper() for part in _NAMES if "PAIR" in macros())}
  if unknown := {name for name in given if name.upper() not in kinds}:
    raise InputError(f"There is no setting {_as_flags(unknown)}; there are {_as_flags(known)}.")
  for name, text in given.items():
    bindings.append(f"{name.upper()} = {_value(name, text, kinds[name.upper()])}")
  return bindings


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str | None], list[str]]:
  """Return words; flags with their texts, or None; and bindings of flags that begin with --gin."""
  words: list[str] = []
  given: dict[str, str | None] = {}
  bindings: list[str] = []
  booleans, rest = {name for name, kind in _kinds().items() if kind is bool}, list(arguments)
  while rest:
    flag, equals, text = rest.pop(0).partition("=")
    if not flag.startswith("--"):
      words.append(flag + equals + text)
      continue
    name = flag[2:].replace("-", "_")
    follows = bool(rest) and not rest[0].startswith("--")
    if follows and name.upper() in booleans:
      follows = rest[0].lower() in ("true", "false")  # otherwise, it is a word
    value = text if equals else rest.pop(0) if follows else None
    if name.startswith("gin."):
      bindings.append(f"{name.removeprefix('gin.')} = {_gin_value(value)}")
    else:
      given[name.lower()] = value
  return words, given, bindings


def _plural(name: str) -> str:
  """Return the setting that takes several values of `name`, if only that exists."""
  kinds = _kinds()
  return f"{name}s" if name.upper() not in kinds and f"{name}s".upper() in kinds else name


def _value(name: str, text: str | None, kind: Any) -> str:
  """Return the value of a flag as gin reads it."""
  if text is None and bool in flag_values.members(kind):
    return "True"
  if text is None:
    raise InputError(f"--{name} needs a value: {flag_values.described(kind)}.")
  if text.startswith(("@", "%")):
    return text
  try:
    return repr(flag_values.read(text, kind))
  except ValueError as error:
    raise InputError(f"--{name}: {error}.") from error


def _gin_value(text: str | None) -> str:
  if text is None:
    return "True"
  if text.startswith(("@", "%", "(", "[", "{", "'", '"')):
    return text
  if text in ("true", "false"):
    return text.title()  # as a string, "false" would be true
  try:
    ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return repr(text)
  return text


class _Setting(NamedTuple):
  """Setting of a named draft or verifier, which has a flag."""

  parameter: str
  kind: Any
  default: Any


def _settings_of(
  part: str, name: str, entry: registry.Entry, given: Mapping[str, str | None]
) -> dict[str, _Setting]:
  """Return the settings of a named draft, and of the drafts that flags name, or of a verifier."""
  if part == "draft":
    drafts = {"draft": given.get("base_draft"), "inner": given.get("inner")}
    several = {"drafts": (given["drafts"] or "").split(",")} if "drafts" in given else {}
    found = registry.draft_parameters(name, {k: x for k, x in drafts.items() if x} | several)
  else:
    found = registry.parameters(entry.path)
  names = {LoadsDraft: str, Sequence[LoadsDraft]: Sequence[str]}  # or checkpoints
  return {
    registry.flag_of(each): _Setting(each, names.get(x.annotation, x.annotation), x.default)
    for each, x in found.items()
  }


def _take_named(part: str, given: dict[str, str | None], kinds: Mapping[str, Any]) -> list[str]:
  """Take the flag --draft or --verifier and those of its settings, and return their bindings."""
  if part not in given:
    return []
  text = given.pop(part)
  if text is None:
    raise InputError(f"--{part} needs a value: a name, of which --help has a list.")
  bindings, value = [], text if text.startswith(("@", "%")) else repr(text)
  if entry := registry.entry(part, text):
    value = f"@registry.{part}()"
    bindings.append(f"registry.{part}.name = {text!r}")
    for flag, setting in _settings_of(part, text, entry, given).items():
      at = f"registry.{part}.{setting.parameter}"
      if flag == "target_text" and "TARGET_TEXT" in kinds:
        bindings.append(f"{at} = %TARGET_TEXT")
      elif flag in given and flag.upper() not in kinds:
        bindings.append(f"{at} = {_value(flag, given.pop(flag), setting.kind)}")
  elif part == "verifier" and value != text:
    registry.verifier(text)  # raises that there is no such name
  bindings.append(f"{part.upper()} = {value}")
  for function in ("load.load_pair", "random_models.random_pair"):
    bindings.append(f"{function}.{part} = %{part.upper()}")
  return bindings


def parse_gin(
  files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> None:
  """Parse gin files, then bindings, which override those in the files."""
  parse_files(files, search_paths)
  parse_bindings(bindings)


def parse_files(files: Sequence[str], search_paths: Sequence[str] = ()) -> None:
  """Parse gin files, which are in the current folder, in `search_paths` or in this project."""
  del gin.config._FILE_READERS[1:]  # they would search Python packages, and import these
  for folder in (*search_paths, str(gin_files.HOME)):
    gin.add_config_file_search_path(folder)
  try:
    for file in files:
      gin.parse_config_file(file)
  except _INVALID as error:
    raise InputError(str(error)) from error


def parse_bindings(bindings: Sequence[str]) -> None:
  """Parse bindings 'name = value' after the files, and bind parameters to macros of their name.

  A macro is also the value of the parameter that has its name in lower case (`_parameters`). A
  target without a dtype has the dtype of the device; the bundled one has float32.

  Raises:
    InputError: a binding is invalid, or sets a macro that no file defines or uses and that is not a
      setting; a required macro has no value.
  """
  names = {binding.partition("=")[0].strip() for binding in bindings}
  known = {*macros()}
  try:
    parameters = _parameters()
    gin.parse_config(bindings)
    parameters |= _parameters()  # of another pair, if a binding names one
    if "TARGET" in names and "dtype" in parameters and "DTYPE" not in macros():
      gin.parse_config("DTYPE = 'auto'")
    known |= {name.upper() for name in (*parameters, *(_NAMES if "PAIR" in macros() else ()))}
    for name, place in parameters.items():
      bound = gin.get_bindings(place.selector, resolve_references=False)
      if name.upper() in macros() and name not in bound:
        gin.parse_config(f"{place.selector}.{name} = %{name.upper()}")
    used = _used_macros()
    known |= used
    if unknown := names & {*macros()} - known:
      raise InputError(f"There is no setting {_as_flags(unknown)}; there are {_as_flags(known)}.")
    if missing := used - {*macros()}:
      raise InputError(f"The gin files need values of {_as_flags(missing)}; give these flags.")
    gin.finalize()
  except _INVALID as error:
    raise InputError(str(error)) from error


class _Place(NamedTuple):
  """Parameter that a setting is bound to, and the gin selector of its function."""

  selector: str
  function: Callable[..., Any]
  parameter: inspect.Parameter


def _parameters() -> dict[str, _Place]:
  """Return the places of settings that no file binds.

  These are the parameters of the run's function, the fields of its `generation`, and the parameters
  of the function that PAIR calls, except for those that are given by name only, which take values
  of Python. A name belongs to the first that has it, or its plural. Macros that other bindings use
  are not settings of the last two.
  """
  experiment = gin.config._CONFIG.get(_RUN, {}).get("experiment")
  generation, pair = _bound(experiment).get("generation"), _pair()
  found: dict[str, _Place] = {}
  taken, used = set[str](), set[str]()
  for reference in (experiment, generation, pair):
    if isinstance(reference, gin.config.ConfigurableReference):
      function, bound = reference.configurable.wrapped, _bound(reference)
      parameters = inspect.signature(function).parameters
      for name, x in parameters.items():
        is_free = name not in bound and name.upper() not in used
        is_free &= reference is not pair or x.kind is not x.KEYWORD_ONLY
        if is_free and taken.isdisjoint((name, f"{name}s")):
          found[name] = _Place(reference.scoped_selector, function, x)
      taken |= {*parameters}
    used = _used_macros()
  return found


def _pair() -> object:
  """Return the reference to the function that PAIR calls, or that loads the pair it changes."""
  pair, inner = None, macros().get("PAIR")
  while isinstance(inner, gin.config.ConfigurableReference):
    pair, bound = inner, _bound(inner)
    inner = bound.get("value", bound.get("pair"))  # of a macro, or of a function such as `sharded`
  return pair


def _bound(reference: object) -> dict[str, Any]:
  """Return the bindings of the function that a reference names; other values have none."""
  if not isinstance(reference, gin.config.ConfigurableReference):
    return {}
  return gin.get_bindings(reference.scoped_selector, resolve_references=False)


def _places() -> dict[str, _Place]:
  """Return the place of each setting that is bound to a parameter, by the name of its macro."""
  places = {name.upper(): place for name, place in _parameters().items()}
  for (_, selector), bound in gin.config._CONFIG.items():
    for parameter, value in bound.items():
      if isinstance(value, gin.config.ConfigurableReference) and (
        value.configurable.selector == "gin.macro"
      ):
        function = gin.config._REGISTRY[selector].wrapped
        x = inspect.signature(function).parameters.get(parameter)
        if selector != "gin.macro" and x is not None:
          places[value.config_key[0]] = _Place(selector, function, x)
  return places


def _kinds() -> dict[str, Any]:
  """Return the type of each setting: of the parameter that it is bound to, or of its value."""
  kinds = {name: _kind_of(value) for name, value in macros().items()}
  return kinds | {name: place.parameter.annotation for name, place in _places().items()}


def _kind_of(value: object) -> Any:
  if isinstance(value, gin.config.ConfigurableReference) and value.evaluate:
    return inspect.signature(value.configurable.wrapped).return_annotation
  if isinstance(value, (list, tuple)):
    return Sequence[type(value[0])] if value else Sequence  # type: ignore[misc]
  return type(value) if isinstance(value, (bool, int, float, str)) else Any


class Macro:
  """Macro of the gin configuration, as a picklable function that returns its value.

  Another process parses the configuration when it first calls the function.
  """

  def __init__(self, name: str):
    self._name, self._config = name, gin.config_str()

  def __call__(self) -> Any:
    if not gin.config_is_locked():  # this process has not parsed the gin files
      gin.parse_config(self._config)
    return gin.get_configurable(f"{self._name}/gin.macro")()


def macros() -> dict[str, object]:
  """Return the macros of the parsed gin files."""
  config = gin.config._CONFIG
  return {name: bound["value"] for (name, kind), bound in config.items() if kind == "gin.macro"}


def _used_macros() -> set[str]:
  references = gin.config.iterate_references(gin.config._CONFIG)
  return {ref.config_key[0] for ref in references if ref.config_key[1] == "gin.macro"}


def _as_flags(names: Iterable[str]) -> str:
  return ", ".join(f"--{name.lower()}" for name in sorted(names))


def _help(values: flags.FlagValues) -> str:
  lines = [_USAGE, "Runs, then studies of the current folder:"]
  for name, path in gin_files.runs().items():
    lines.append(f"  {name:<20} {gin_files.summary(path)}")
  return "\n".join([*lines, values.module_help(__name__)])


def _help_of_run(files: Sequence[str], arguments: Sequence[str], values: flags.FlagValues) -> str:
  parse_files(files, values.gin_search_paths)
  lines = [_USAGE, *(gin_files.header(file) for file in files), "", "Settings:"]
  places, parameters = _places(), _parameters()
  values_of = {name.upper(): place.parameter.default for name, place in parameters.items()}
  for name, value in (values_of | macros()).items():
    place = places.get(name)
    words = flag_values.meaning(place.function, place.parameter.name) if place else ""
    lines.append(f"{_setting(name, value):<38}  {words}".rstrip())
  if "PAIR" not in macros():
    return "\n".join(lines)
  given = _split(arguments)[1]
  for part, entries in _NAMES.items():
    name = given.get(part) or ""
    if entry := registry.entry(part, name):
      lines += ["", f"Settings of --{part} {name}, which is for: {entry.use}"]
      found = _settings_of(part, name, entry, given)
      lines += [_setting(flag, x.default) for flag, x in found.items() if flag not in parameters]
    else:
      lines += ["", f"Values of --{part}; with --help too, one prints its settings:"]
      in_front = {each: entry for each, entry in entries.items() if not entry.is_on_shelf}
      lines += [f"  {each:<25} {entry.use}" for each, entry in in_front.items()]
      shelf = ", ".join(each for each in entries if each not in in_front)
      lines += [f"On the shelf, complete but slower: {shelf}"]
  return "\n".join(lines)


def _setting(name: str, value: object) -> str:
  text = "(required)" if value is inspect.Parameter.empty else repr(value)
  if inspect.isfunction(value):
    text = f"@{value.__name__}"
  return f"  --{name.lower()} {shlex.quote(value if type(value) is str else text)}"


def command() -> None:
  """Run the command `specdec` and exit with its status."""
  sys.path.insert(0, "")  # modules of the current folder are found, as with `python -m`
  sys.exit(main(sys.argv))


if __name__ == "__main__":
  # Gin files name the module specdec_jax.run, which is not the same object as __main__.
  from specdec_jax.run import command as _command

  _command()
