"""The text of a program that XLA has optimised: its instructions, and how often each one runs."""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

_COLLECTIVES = re.compile(
  "(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?"
)
# Attributes that name computations which an instruction runs.
_LOOPS = "body|condition|true_computation|false_computation|branch_computations"
_ROLES = f"{_LOOPS}|calls|to_apply|called_computations"


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
    """Return the first match of the pattern's group, or an empty string."""
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
  return _executed(hlo, lambda instruction: bool(_COLLECTIVES.fullmatch(instruction.op)), _ROLES)


def estimated_cycles(hlo: str) -> int:
  """Cycles of one run by the compiler's own cost model, where it states them.

  Loops and conditionals count as in `executed_collectives`.
  """
  cycles = lambda instruction: int(instruction.first(r'"estimated_cycles":"(\d+)"') or 0)
  return _executed(hlo, cycles, _LOOPS)


def _executed(hlo: str, count: Callable[[Instruction], int], roles: str) -> int:
  """The sum of `count` over the instructions of a program, each as often as it runs.

  Computations that an instruction calls in these roles belong to the program.
  """
  computations, entry = parse(hlo)

  @functools.cache
  def executed(computation: str) -> int:
    total = 0
    for instruction in computations[computation].values():
      times = trip_count(computations, computation, instruction)
      total += count(instruction) + times * sum(map(executed, instruction.calls(roles)))
    return total

  return executed(entry)


def convolutions(hlo: str) -> int:
  """Instructions for a TPU's matrix unit, to which a matmul is a convolution."""
  computations, _ = parse(hlo)
  return sum(i.op == "convolution" for inside in computations.values() for i in inside.values())


def matrix_converts(hlo: str) -> int:
  """Conversions of whole bfloat16 matrices to float32, from 2^20 elements.

  A matmul that the compiler writes for the vector unit, as a sum of products, begins with one of
  its weights and may have one of its activations, repeated to the same shape.
  """
  computations, _ = parse(hlo)
  return sum(
    i.op == "convert"
    and i.shape.startswith("f32[")
    and size(i.shape) >= 1 << 20
    and all(inside[operand].shape.startswith("bf16[") for operand in i.operands)
    for inside in computations.values()
    for i in inside.values()
  )


def size(shape: str) -> int:
  """Elements of an array, or of the largest one in a tuple."""
  dimensions = re.findall(r"\w\[([\d,]*)\]", shape)
  return max((math.prod(int(n) for n in one.split(",") if n) for one in dimensions), default=0)


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
