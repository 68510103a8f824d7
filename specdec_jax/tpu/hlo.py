"""The text of a program that XLA has optimised: its instructions, and how often each one runs."""

import collections
import functools
import re
from typing import NamedTuple

_COLLECTIVES = re.compile(
  "(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?"
)
# Attributes that name computations which an instruction runs.
_ROLES = "calls|to_apply|body|condition|true_computation|false_computation"
_ROLES += "|branch_computations|called_computations"


class Instruction(NamedTuple):
  """One line of a module's text.

  Attributes:
    shape: of the result, with its layout and memory space.
    op: the operation.
    operands: names of other instructions of the same computation.
    line: all of it.
  """

  shape: str
  op: str
  operands: list[str]
  line: str

  def calls(self, role: str) -> list[str]:
    """Names of the computations that it calls in a role, such as 'body|condition'."""
    named = re.findall(rf"\b(?:{role})=({{[^}}]*}}|%[\w.-]+)", self.line)
    return [name for names in named for name in re.findall(r"%([\w.-]+)", names)]

  def first(self, pattern: str) -> str:
    """What the pattern's group matches first, or nothing."""
    return (re.findall(pattern, self.line) or [""])[0]


Computations = dict[str, dict[str, Instruction]]  # instructions by name, by computation


def parse(hlo: str) -> tuple[Computations, str]:
  """The computations of a module, and the name of its entry."""
  computations: Computations = collections.defaultdict(dict)
  entry = computation = ""
  for line in hlo.splitlines():
    if head := re.match(r"(ENTRY )?%(\S+) .*{$", line):
      computation = head[2]
      entry = computation if head[1] else entry
    elif found := re.match(r"\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z-]*)\((.*?)\)", line):
      name, shape, op, operands = found.groups()
      operands = re.findall(r"%([\w.-]+)", operands)
      computations[computation][name] = Instruction(shape, op, operands, line)
  return computations, entry


def executed_collectives(hlo: str) -> int:
  """Messages between chips that one run of a program sends: its collective instructions, those in a
  loop times its trip count.

  A loop counts once if its trip count is not known before it runs, as the decoding loops', and
  of a conditional every branch counts.
  """
  computations, entry = parse(hlo)

  @functools.cache
  def executed(computation: str) -> int:
    count = 0
    for instruction in computations[computation].values():
      count += bool(_COLLECTIVES.fullmatch(instruction.op))
      times = trip_count(computations, computation, instruction)
      count += times * sum(map(executed, instruction.calls(_ROLES)))
    return count

  return executed(entry)


def trip_count(computations: Computations, computation: str, instruction: Instruction) -> int:
  """How often a loop runs that counts up to a constant, as `lax.scan` and `lax.fori_loop` do; 1 for
  all other instructions."""
  if instruction.op != "while":
    return 1
  if known := instruction.first(r'known_trip_count":{"n":"(\d+)"'):  # the compiler for CPUs says it
    return int(known)
  (condition,) = instruction.calls("condition")
  inside = computations[condition]
  test = next(i for i in inside.values() if i.line.lstrip().startswith("ROOT"))
  if test.op != "compare" or "direction=LT" not in test.line:
    return 1
  counter, limit = (inside[operand] for operand in test.operands)
  made = computations[computation][instruction.operands[0]]
  if counter.op != "get-tuple-element" or made.op != "tuple":
    return 1
  start = computations[computation][made.operands[int(counter.first(r"index=(\d+)"))]]
  while start.op in ("copy", "bitcast"):
    start = computations[computation][start.operands[0]]
  if not start.op == limit.op == "constant":
    return 1
  first, last = (int(i.first(r" constant\((-?\d+)\)")) for i in (start, limit))
  return last - first
