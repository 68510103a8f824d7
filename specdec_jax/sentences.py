"""Errors that are the user's to mend, gin's among them, as one sentence each."""

import errno
import os
import pathlib
import re
import sys
import traceback
from typing import Any

from specdec_jax.errors import InputError

_MENDABLE = (
  *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
  *(errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EFBIG, errno.EBUSY),
  *(errno.ELOOP, errno.ENXIO, errno.ETXTBSY, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Modules of ours that became several.
_SPLIT = {"drafters": "specdec_jax.drafts.prompt_lookup and specdec_jax.drafts.ngram"}
_UNSET = r"has no value; set it with --gin.\1=VALUE"
_QUOTES = """text needs quotes of its own, as in '"text"'"""

# gin's messages, and what is made of them.
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
  if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
    half = f"U+{ord(error.object[error.start]):04X}"
    return f"{error.object!a:.100} has half a surrogate pair, {half}; leave it out."
  if isinstance(error, ValueError) and "embedded null" in text:
    return "the name of a file or folder has a NUL character, which no name can have; leave it out."
  if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
    detail = str(error).removeprefix("RESOURCE_EXHAUSTED:").strip().partition("\n")[0].rstrip(".")
    return f"there is not enough memory{detail and ': '}{detail}; ask for less."
  if text.startswith("Unable to initialize backend") or _jax_has_no_device(error):
    return _platform_sentence(text)
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
  package, name = pathlib.Path(__file__).resolve().parent, old.rpartition(".")[2]
  found = [*package.rglob(f"{name}.py")]
  if not old.startswith("specdec_jax.") or not (name in _SPLIT or len(found) == 1):
    return text
  now = _SPLIT.get(name) or found[0].relative_to(package.parent).with_suffix("").as_posix()
  now = now.replace("/", ".")
  return re.sub(r"No module named '\S+?'", f"{old} is now {now}; change the gin file", text)


def _os_sentence(error: OSError) -> str:
  # Files that are written have names here (`writing`), standard output has none.
  name = "standard output" if error.filename is None else f"'{error.filename}'"
  free = "; free some space there, or write to another place" if error.errno in _FULL else ""
  return f"cannot use {name}: {error.strerror}{free}."


def _platform_sentence(text: str) -> str:
  """jax finds no device of the platforms that JAX_PLATFORMS names; it does not always say why."""
  asked = os.environ.get("JAX_PLATFORMS", "")
  said = re.sub(r"\s*\(set JAX_PLATFORMS.*", "", " ".join(text.split())).rstrip(".")
  return (
    f"JAX_PLATFORMS is '{asked}', which jax cannot use here{said and ': '}{said}; unset it, or "
    "name a platform that this machine has."
  )


def _jax_has_no_device(error: BaseException) -> bool:
  """Return True if jax failed to start; for JAX_PLATFORMS=cuda its assertion has no message."""
  bridge: Any = sys.modules.get("jax._src.xla_bridge")
  asked = bridge is not None and "JAX_PLATFORMS" in os.environ
  silent = isinstance(error, AssertionError) and not error.args
  return silent and asked and not bridge.backends_are_initialized()


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
  return f"{plainer(message)}{place}."


def plainer(message: str) -> str:
  """A message of gin, shortened to what its user can act on."""
  message = " ".join(message.split())
  for pattern, plain in _PLAINER:
    if re.fullmatch(pattern, message):
      return re.sub(pattern, plain, message)
  return message.rstrip(".")
