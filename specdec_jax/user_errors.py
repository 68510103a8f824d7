"""One-line messages for errors that the user can correct, including errors that gin raises."""

import argparse
import errno
import os
import re
import sys
import traceback
from typing import Any, NoReturn

from specdec_jax.errors import InputError

_USER_ERRNOS = (
  *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
  *(errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EFBIG, errno.EBUSY),
  *(errno.ELOOP, errno.ENXIO, errno.ETXTBSY, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
)
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSET = r"has no value; set it with --gin.\1=VALUE"
_QUOTES = """a string needs quotes of its own, as in '"text"'"""

# Patterns of gin's messages, and the shorter messages that replace them.
_GIN_MESSAGES = (
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


class ArgumentParser(argparse.ArgumentParser):
  """Argument parser that accepts no abbreviated options, and prints only one line for an error."""

  def __init__(self, description: str):
    super().__init__(description=description, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message}.\n")


def format_error(error: BaseException) -> str | None:
  """Return the message to print for an error that the user can correct, or None for a bug."""
  text = str(error)
  # gin extends a message by raising a copy of a subclass that it creates. Find the original error.
  # An InputError is original, although its context may be a ValueError, which is its base class.
  while error.__context__ and type(error).__base__ is type(error.__context__):
    if type(error) is InputError:
      break
    error = error.__context__
  if isinstance(error, InputError):
    return " ".join(str(error).split())
  if isinstance(error, OSError) and error.errno is not None:
    return _format_os_error(error) if error.errno in _USER_ERRNOS else None
  if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
    surrogate = f"U+{ord(error.object[error.start]):04X}"
    return f"{error.object!a:.100} has half a surrogate pair, {surrogate}; remove it."
  if isinstance(error, ValueError) and "embedded null" in text:
    return "the name of a file or folder has a NUL character, which no name can have; remove it."
  if isinstance(error, MemoryError) or text.startswith("RESOURCE_EXHAUSTED"):
    detail = str(error).removeprefix("RESOURCE_EXHAUSTED:").strip().partition("\n")[0].rstrip(".")
    return f"there is not enough memory{detail and ': '}{detail}; ask for less."
  if text.startswith("Unable to initialize backend") or _jax_has_no_device(error):
    return _format_platform_error(text)
  if isinstance(error, FileNotFoundError):
    return " ".join(str(error).split())
  if isinstance(error, ModuleNotFoundError):
    is_bug = (error.name or "").startswith("specdec_jax") and not _raised_in_gin(error)
    return None if is_bug else _format_gin_error(text)
  if isinstance(error, SyntaxError):
    if (error.filename or "").endswith(".py"):
      return None
    place = f"\n  In file {error.filename!r}, line {error.lineno}\n{error.text or ''}"
    return _format_gin_error((error.msg or "it cannot be read") + place)
  return _format_gin_error(text) if _raised_in_gin(error) else None


def _format_os_error(error: OSError) -> str:
  # `atomic_files` adds the name of the file being written, so no name means standard output.
  name = "standard output" if error.filename is None else f"'{error.filename}'"
  is_full = error.errno in _DISK_FULL_ERRNOS
  advice = "; free some space there, or write to another place" if is_full else ""
  return f"cannot use {name}: {error.strerror}{advice}."


def _format_platform_error(text: str) -> str:
  """Return the message for a platform in JAX_PLATFORMS that jax cannot use.

  Args:
    text: message of jax's error; it is empty for some platforms.
  """
  platforms = os.environ.get("JAX_PLATFORMS", "")
  reason = re.sub(r"\s*\(set JAX_PLATFORMS.*", "", " ".join(text.split())).rstrip(".")
  return (
    f"JAX_PLATFORMS is '{platforms}', which jax cannot use here{reason and ': '}{reason}; unset it,"
    " or name a platform that this machine has."
  )


def _jax_has_no_device(error: BaseException) -> bool:
  """Return True if an exception means that jax found no device of the requested platform."""
  bridge: Any = sys.modules.get("jax._src.xla_bridge")
  platform_is_set = bridge is not None and "JAX_PLATFORMS" in os.environ
  has_no_message = isinstance(error, AssertionError) and not error.args
  return has_no_message and platform_is_set and not bridge.backends_are_initialized()


def _raised_in_gin(error: BaseException) -> bool:
  frames = list(traceback.walk_tb(error.__traceback__))
  return bool(frames) and frames[-1][0].f_globals["__name__"].partition(".")[0] == "gin"


def _format_gin_error(text: str) -> str:
  """Return a gin message, shortened, with the file and line or the binding that it names."""
  message = re.split(r"\n\s*(?:In |No values)", text, maxsplit=1)[0]
  place = ""
  if file := re.search(r"""In file ["'](.*?)["'], line (\d+)\s*(.*)""", text):
    line = "".join(filter(str.isprintable, file[3])).strip()  # the file may be binary
    place = f" ({file[1]}, line {file[2]}: {line})"
  elif binding := re.search(r"In bindings string line \d+\s*(.*)", text):
    place = f" (on the command line: {binding[1].strip()})"
  return f"{simplify_gin_message(message)}{place}."


def simplify_gin_message(message: str) -> str:
  """Return a gin message on one line, shortened to the part that helps the user."""
  message = " ".join(message.split())
  for pattern, replacement in _GIN_MESSAGES:
    if re.fullmatch(pattern, message):
      return re.sub(pattern, replacement, message)
  return message.rstrip(".")
