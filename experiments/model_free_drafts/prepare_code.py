"""Write texts of code and JSON, one per line, made from the sources of Python's standard library:

python -m experiments.model_free_drafts.prepare_code [--output runs/code]

Each task has a folder with sources, outputs, and outputs of other modules, in which n-grams are
counted. No model wrote the outputs:

  continue  the code of a function up to its middle, and the rest
  rename    the code of a function, and the same code with another name for its last argument
  extract   the code of a function, and its name, arguments and documentation in JSON

Line breaks and indentation are written as visible characters. All tasks share a vocabulary that is
trained on the other modules.
"""

import argparse
import ast
import json
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from experiments.lib import script
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.pieces import train_sentence_pieces

NUM_TEXTS, NUM_OTHERS, NUM_PIECES = 100, 2000, 8000
SHORTEST, LONGEST = 400, 1600  # characters of a function


def one_line(code: str) -> str:
  """Return code in one line: ⏎ is a line break, and → four spaces of indentation."""
  lines = code.split("\n")
  depths = [(len(line) - len(line.lstrip(" "))) // 4 for line in lines]
  return "⏎".join("→" * depth + line[4 * depth :] for depth, line in zip(depths, lines))


def functions(path: pathlib.Path) -> Iterator[tuple[str, ast.FunctionDef]]:
  """Yield the code and the syntax of each documented function of a module, if it has arguments."""
  try:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
  except (SyntaxError, UnicodeDecodeError):  # such as files that test the parser
    return
  for node in ast.walk(tree):
    is_function = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    if is_function and node.args.args and node.args.args[-1].arg not in ("self", "cls"):
      code = ast.get_source_segment(text, node, padded=True) or ""
      if SHORTEST <= len(code) <= LONGEST:
        yield code, node


def pairs(code: str, node: ast.FunctionDef) -> dict[str, tuple[str, str]]:
  """Return the source and the output of each task."""
  lines = code.split("\n")
  middle = len(lines) // 2
  names = [arg.arg for arg in node.args.args]
  facts = {"name": node.name, "arguments": names, "documentation": ast.get_docstring(node)}
  renamed = re.sub(rf"\b{names[-1]}\b", f"new_{names[-1]}", code)
  texts = {
    "continue": ("\n".join(lines[:middle]), "\n".join(lines[middle:])),
    "rename": (code, renamed),
    "extract": (code, json.dumps(facts, indent=4)),
  }
  return {task: (one_line(source), one_line(output)) for task, (source, output) in texts.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/code"))
  folder = parser.parse_args().output
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  modules = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
  # Every fifth module is for the texts, and the others for n-grams.
  texts, others = (
    [
      pairs(*found)
      for i, path in enumerate(modules)
      if (i % 5 == 0) == kept
      for found in functions(path)
    ]
    for kept in (True, False)
  )
  texts = texts[:: len(texts) // NUM_TEXTS][:NUM_TEXTS]
  others = others[:: max(1, len(others) // NUM_OTHERS)][:NUM_OTHERS]
  for task in texts[0]:
    (folder / task).mkdir(parents=True, exist_ok=True)
    files = {
      "sources.txt": [each[task][0] for each in texts],
      "outputs.txt": [each[task][1] for each in texts],
      "others.txt": [each[task][1] for each in others],
    }
    for name, rows in files.items():
      with atomic_write(folder / task / name) as file:
        file.write("\n".join(rows) + "\n")
  train_sentence_pieces(
    (line for each in others for _, line in each.values()),
    str(folder / "vocabulary.model"),
    NUM_PIECES,
  )


if __name__ == "__main__":
  script.run(main)
