"""Run commands with --help in a process that finds only the packages of some requirements.

python tests/help_with_extras.py '["specdec_jax[tasks]"]' '[["specdec", "translate"]]'
"""

import contextlib
import importlib.metadata
import io
import json
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPTS = {"sacrebleu": "sacrebleu", "tfds": "tensorflow-datasets"}


def with_dependencies(requirements: Sequence[str]) -> set[str]:
  """Return the names of all distributions that pip installs for these requirements."""
  found, left = set(), [Requirement(text) for text in requirements]
  while left:
    one = left.pop()
    for extra in ("", *one.extras):
      if (key := (canonicalize_name(one.name), extra)) in found:
        continue
      found.add(key)
      with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not on this platform
        needed = map(Requirement, importlib.metadata.requires(one.name) or ())
        left += [x for x in needed if not x.marker or x.marker.evaluate({"extra": extra})]
  return {name for name, _ in found}


def hide_packages(names: set[str]) -> None:
  """Hide the packages of all distributions but the named ones."""
  packages = importlib.metadata.packages_distributions()
  ours = "specdec_jax", "experiments", "scripts"
  hidden = {
    package
    for package, owners in packages.items()
    if package not in ours and names.isdisjoint(map(canonicalize_name, owners))
  }
  find_spec = PathFinder.find_spec

  def find_visible(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find_spec(name, path, target)

  PathFinder.find_spec = find_visible


def print_help(words: Sequence[str], names: set[str]) -> None:
  """Run a command with --help instead of its flags; raise an exception if it fails."""
  import gin

  from specdec_jax.run import main

  program, *rest = words
  if program == "python" and rest[:2] != ["-m", "specdec_jax.run"]:
    is_module = rest[0] == "-m"
    sys.argv = [rest[is_module], "--help"]
    try:
      (runpy.run_module if is_module else runpy.run_path)(rest[is_module], run_name="__main__")
    except SystemExit as done:
      assert not done.code, done.code
  elif program in ("specdec", "python"):
    gin.clear_config()
    assert main(["specdec", *(rest if program == "specdec" else rest[2:]), "--help"]) == 0
  else:
    assert SCRIPTS[program] in names, f"{program} is not installed"


if __name__ == "__main__":
  requirements, commands = map(json.loads, sys.argv[1:])
  sys.path[0] = ""  # not tests/
  names = with_dependencies(requirements)
  hide_packages(names)
  for words in commands:
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        print_help(words, names)
    except Exception as error:
      raise RuntimeError(" ".join(words)) from error
