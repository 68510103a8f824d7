"""The source keeps to the style guide: the field's terms, and functions with few parameters."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specdec_jax"

# Words that this project once used in a sense of its own, and the terms to use instead.
TERMS = {
  r"likeliest": "most probable",
  r"told": "given, conditioned on, or reported",
  r"plain decoding": "autoregressive decoding",
  r"(eldest|elder|younger|youngest)": "first, earlier or later sibling",
  r"laws?": "distribution",
  r"judge[sd]?": "verified",
  r"newest token": "last committed token",
  r"refused (guess|token)": "rejected",
  r"guess(es)? (stands?|is refused|are refused)": "accepted, rejected",
  r"opinions?": "teacher distributions",
  r"(contests?|competitors?)": "comparison, baseline",
  r"(likewise|theirs)": "repeat the noun",
  r"unless told": "by default",
  r"goes? on writing": "decoder-only",
}
FORBIDDEN = re.compile(rf"\b({'|'.join(TERMS)})\b", re.IGNORECASE)
# Names of drafts in records of schema 1.
RECORDED = {", told by largest probability", ", told by entropy bound"}
CLAUSE = re.compile(r"(What|Of|Whether|Those|That|The same)\b")

# Gin configures these, t5x fixes their signature, or they mirror the arguments of transformers.
MANY_PARAMETERS = {
  "api.Pair.generate",
  "bench.acceptance.acceptance",
  "bench.beams.beams",
  "bench.drafts.compare_drafts",
  "bench.gamma.gamma",
  "bench.trees.trees",
  "bench.reproduce.reproduce",
  "commands.check_exactness.check_exactness",
  "commands.decode.decode",
  "bench.given_outputs.given_outputs",
  "bench.online.serve_and_learn",
  "bench.peers.comparison.random",
  "bench.peers.comparison.trained",
  "bench.online.serve_and_store",
  "bench.throughput.measure_throughput",
  "commands.quickstart.quickstart",
  "commands.serve.serve",
  "commands.speedup.speedup",
  "commands.train.train_draft",
  "commands.train.train_speculator",
  "commands.train.train_target",
  "commands.train_jointly.train_jointly",
  "commands.translate.translate",
  "drafts.heads.__init__.speculator_config",
  "models.decoder.Decoder.__call__",  # the arrays of one block; Flax passes them one by one
  "pairs.load.load_for",
  "pairs.load.load_pair",
  "pairs.random_weights.random_draft",
  "pairs.random_weights.random_pair",
  "t5x_model.model.SpeculativeModel.__init__",
}

# Functions of any number of arguments, to which a sequence is rightly unpacked.
VARIADIC = {"zip", "join", "tag", "slice", "PartitionSpec", "assemble", "scatter", "chain", "map"}
VARIADIC |= {"reshape"}


def prose(path: pathlib.Path) -> list[str]:
  """Return docstrings, comments and messages of a module, or the paragraphs of a page."""
  source = path.read_text(encoding="utf-8")
  if path.suffix == ".gin":
    return re.findall(r"#.*", source)
  if path.suffix == ".md":
    text = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", source, flags=re.S)
    return re.split(r"\n\s*\n", text)
  strings = [
    node.value
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
  ]
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return strings + [token.string for token in tokens if token.type == tokenize.COMMENT]


def relative(paths) -> list[str]:
  return sorted(str(path.relative_to(ROOT)) for path in paths)


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("gin/**/*.gin")]
PAGES += ROOT.glob("experiments/**/*.md")
MODULES = [*PACKAGE.rglob("*.py")]


@pytest.mark.parametrize("path", relative([*MODULES, *PAGES]))
def test_prose_uses_the_terms_of_the_field(path):
  found = [
    f"{match.group(0)!r} in {' '.join(text.split())[:100]!r}"
    for text in prose(ROOT / path)
    if text not in RECORDED and (match := FORBIDDEN.search(text))
  ]
  assert not found, found


def docstrings(source: str) -> list[str]:
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
  return [text for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("path", relative(MODULES))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
  source = (ROOT / path).read_text(encoding="utf-8")
  assert not [text for text in docstrings(source) if CLAUSE.match(text)]


def test_forbidden_terms_are_found():
  assert FORBIDDEN.search("the likeliest token") and FORBIDDEN.search("Laws of tokens")
  assert not FORBIDDEN.search("an understandable, lawful and withstanding claim")
  assert CLAUSE.match("What a round leaves.") and not CLAUSE.match("Offset of a token.")


def functions(tree: ast.Module) -> list[tuple[str, int]]:
  """Return qualified names of all functions, and their number of parameters without `self`."""
  found = []

  def visit(node: ast.AST, prefix: str) -> None:
    for child in ast.iter_child_nodes(node):
      name = prefix
      if isinstance(child, ast.ClassDef | ast.FunctionDef):
        name = f"{prefix}.{child.name}"
      if isinstance(child, ast.FunctionDef):
        args = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
        is_method = bool(args) and args[0].arg in ("self", "cls")
        found.append((name, len(args) - is_method))
      visit(child, name)

  visit(tree, "")
  return found


def test_only_configured_functions_have_more_than_eight_parameters():
  many = set()
  for path in MODULES:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    many |= {
      f"{module}{name}" for name, count in functions(ast.parse(path.read_text())) if count > 8
    }
  assert many == MANY_PARAMETERS


def test_arguments_are_rarely_passed_as_an_anonymous_tuple():
  calls = []
  for path in MODULES:
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.Call):
        continue
      function = ast.unparse(node.func).rpartition(".")[2]
      names = {
        arg.value.id
        for arg in node.args
        if isinstance(arg, ast.Starred) and isinstance(arg.value, ast.Name)
      }
      if names - {"args"} and function not in VARIADIC:
        calls.append(ast.unparse(node))
  assert len(calls) <= 20, calls
