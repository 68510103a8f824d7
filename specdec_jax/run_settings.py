"""Settings of a run, read from its gin files for help texts and for flags such as `--gamma 5`.

A setting is a macro in the gin file of the run or in a file that it includes. Its meaning is read
from the docstring of the function or class whose argument the macro sets. No module is imported for
this, so help is printed without delay.
"""

import ast
import difflib
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specdec_jax import gin_files
from specdec_jax.errors import InputError

CHECKPOINTS = "gin/models/checkpoints.gin"  # read if one of its flags, such as --target, is given
SWITCHES = ("debug", "nodebug", "help", "h", "version", "completion")  # flags without a value
_MACRO = re.compile(r"^(?:\w+/)?([A-Z][A-Z0-9_]*)\s*=\s*(.*)")
_INCLUDE = re.compile(r"^include\s+['\"](.+)['\"]")
_IMPORT = re.compile(r"^from (specdec_jax[\w.]*) import (\w+)")
_BLOCK = re.compile(r"^(?:\w+/)?(\w+)\.(\w+):")
_BINDING = re.compile(r"^(?:\s+|(?:\w+/)?(\w+)\.(\w+)\.)(\w+)\s*=\s*%(?:\w+/)?(\w+)\s*(?:#.*)?$")
_ARGUMENT = re.compile(r"^ {2}(\*{0,2}\w+): (.*(?:\n {4}.*)*)", re.MULTILINE)


class Setting(NamedTuple):
  """Setting of a run: a macro of its gin files.

  Attributes:
    name: name of the macro, such as NUM_TEXTS.
    default: value and comment of the macro in the gin file, as text.
    meaning: first sentence about the argument that the macro sets; '' if there is none.
  """

  name: str
  default: str
  meaning: str

  @property
  def flag(self) -> str:
    return "--" + self.name.lower()


def settings(files: Iterable[str]) -> dict[str, Setting]:
  """Return the settings in gin files and in the files that they include, by name of the macro."""
  found: dict[str, Setting] = {}
  for path in _included(files):
    found |= _settings_of(path.read_text(encoding="utf-8", errors="replace"))
  return found


def _included(files: Iterable[str]) -> Iterator[pathlib.Path]:
  """Yield each existing file once, after the files that it includes."""
  seen: set[pathlib.Path] = set()

  def visit(name: str) -> Iterator[pathlib.Path]:
    for path in (pathlib.Path(name), gin_files.HOME / name):
      if path.is_file() and path.resolve() not in seen:
        seen.add(path.resolve())
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
          if match := _INCLUDE.match(line):
            yield from visit(match[1])
        yield path
      if path.is_file():
        return

  for name in files:
    yield from visit(name)


def _settings_of(source: str) -> dict[str, Setting]:
  lines = source.splitlines()
  modules = {match[2]: match[1] for line in lines if (match := _IMPORT.match(line))}
  macros: dict[str, str] = {}
  meanings: dict[str, str] = {}
  block = "", ""
  for number, line in enumerate(lines):
    if match := _MACRO.match(line):
      macros[match[1]] = _continued(lines, number, match[2]).replace("  # ", "; ")
    elif match := _BLOCK.match(line):
      block = match[1], match[2]
    elif match := _BINDING.match(line):
      module, function = (match[1], match[2]) if match[1] else block
      if module in modules and match[4] not in meanings:
        meanings[match[4]] = _argument(f"{modules[module]}.{module}", function, match[3])
  return {name: Setting(name, macros[name], meanings.get(name, "")) for name in macros}


def _continued(lines: Sequence[str], number: int, value: str) -> str:
  """Return a value that starts in line `number`, joined with the lines that continue it.

  A continuation line is indented or closes a bracket.
  """
  for line in lines[number + 1 :]:
    if not re.match(r"^(\s+\S|[\])}])", line):
      break
    value += " " + line.strip()
  return value


def _argument(module: str, function: str, name: str) -> str:
  """Return the first sentence about an argument in the docstring of a function or class, or ''."""
  path = gin_files.PACKAGE.joinpath(*module.split(".")[1:])
  candidates = [path.with_suffix(".py")]
  if path.is_dir():
    candidates = sorted(path.glob("*.py"))
  for file in candidates:
    if not file.is_file():
      continue
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
      if getattr(node, "name", None) == function:
        documented = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        for match in _ARGUMENT.finditer(documented):
          if match[1] == name:
            return re.split(r"(?<=\.)\s", " ".join(match[2].split()))[0]
  return ""


def flags_to_bindings(arguments: Sequence[str], known: set[str]) -> list[str]:
  """Replace each flag that names a setting of the run by a binding of the setting's macro.

  `--num_texts 5`, `--num-texts=5` and `--gin.NUM_TEXTS=5` are equivalent. A value is taken as text
  unless it is a Python or gin expression, such as a number, None, True or False. A setting of
  CHECKPOINTS can be given for any run; CHECKPOINTS is then added as a gin file. After a run that
  takes names (`gin_files.TAKES_NAMES`), `a b` is equivalent to `--gin.NAMES='("a", "b")'`.

  Args:
    arguments: arguments of the command line, without the name of the program.
    known: names of the other flags, which are returned unchanged.

  Raises:
    InputError: a flag has no value, or is neither known nor a setting of the run.
  """
  if arguments and arguments[0] in gin_files.TAKES_NAMES:
    first, *rest = arguments
    names = tuple(itertools.takewhile(lambda argument: not argument.startswith("-"), rest))
    arguments = [first, *([f"--gin.NAMES={names!r}"] if names else []), *rest[len(names) :]]
  files = _files(arguments)
  macros = settings(files)
  extra = {name: each for name, each in settings([CHECKPOINTS]).items() if name not in macros}
  out: list[str] = []
  used_extra, rest = False, list(arguments)
  while rest:
    argument = rest.pop(0)
    if argument == "--":
      return out + [argument, *rest]
    if argument.startswith("--gin."):
      out.append(_bound(argument))
      continue
    flag, equals, value = argument.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or name.removeprefix("no") in known or name in known:
      out.append(argument)
      continue
    macro = name.upper()
    if macro not in macros and macro not in extra:
      raise InputError(_unknown_flag(flag, files, [*macros, *extra], known))
    used_extra |= macro in extra
    if not equals:
      if not rest or rest[0].startswith("--"):
        raise InputError(f"{flag} has no value; write {flag} VALUE.")
      value = rest.pop(0)
    out.append(f"--gin_bindings={macro} = {gin_value(value)}")
  return out + ([f"--gin_file={CHECKPOINTS}"] if used_extra else [])


def _files(arguments: Sequence[str]) -> list[str]:
  """Return the gin files that arguments name: those of runs, and the values of --gin_file."""
  files, flag = [], ""  # the flag whose value is the next argument
  for argument in arguments:
    if argument.startswith("-"):
      name, equals, value = argument.lstrip("-").partition("=")
      if name == "gin_file" and equals:
        files.append(value)
      flag = "" if equals or name in SWITCHES else name
    else:
      if flag == "gin_file":
        files.append(argument)
      elif not flag:
        files.append(gin_files.find_run(argument))
      flag = ""
  return files


def _bound(argument: str) -> str:
  """Return the flag --gin_bindings that is equivalent to --gin.NAME=VALUE."""
  name, equals, value = argument.removeprefix("--gin.").partition("=")
  if not (name and equals):
    raise InputError(f"{argument} has no value; write --gin.NAME=VALUE.")
  return f"--gin_bindings={name} = {value and gin_value(value)}"


def gin_value(text: str) -> str:
  """Return `text` unchanged if it is a gin expression, otherwise return it as a quoted string."""
  if text[:1] in tuple("@%([{'\""):
    return text
  try:
    ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return repr(text)
  return text


def _unknown_flag(
  flag: str, files: Sequence[str], macros: Sequence[str], known: Iterable[str]
) -> str:
  names = ["--" + name.lower() for name in macros] + ["--" + name for name in known]
  near = difflib.get_close_matches(flag.lower().replace("-", "_").replace("__", "--", 1), names, 1)
  hint = f"did you mean {near[0]}?" if near else "--help lists the flags."
  runs = ", ".join(pathlib.Path(path).stem for path in files)
  where = f" is neither a flag nor a setting of {runs}" if runs else " is not a flag"
  return f"{flag}{where}; {hint}"


def files_with(macro: str) -> list[str]:
  """Return the gin files of the project that define a macro, as paths relative to the project.

  If CHECKPOINTS is among them, return only CHECKPOINTS.
  """
  found = []
  for path in sorted(gin_files.HOME.glob("gin/**/*.gin")):
    if macro in _settings_of(path.read_text(encoding="utf-8")):
      found.append(str(path.relative_to(gin_files.HOME)))
  return [CHECKPOINTS] if CHECKPOINTS in found else found


def help_text(files: Sequence[str], width: int = 100) -> str:
  """Return the help text of a run: the comment at the top of its gin file, and its settings."""
  head = "\n".join(gin_files.header(pathlib.Path(path)) for path in files)
  wide = max((len(each.flag) for each in settings(files).values()), default=0) + 4
  lines = [head, "", "Settings, as --name VALUE or --gin.NAME=VALUE:"]
  for each in settings(files).values():
    text = f"{each.meaning or ''} (default: {each.default})".strip()
    lines += textwrap.wrap(
      text,
      width,
      initial_indent=f"  {each.flag}".ljust(wide),
      subsequent_indent=" " * wide,
      break_on_hyphens=False,
    )
  extra = settings([CHECKPOINTS])
  if any("load_pair" in path.read_text("utf-8", "replace") for path in _included(files)):
    names = ", ".join(e.flag for e in extra.values() if e.name not in settings(files))
    lines += ["", f"Your own models ({CHECKPOINTS}): {names}."]
  return inspect.cleandoc("\n".join(lines))
