"""Copies of weights in a program that XLA has optimised."""

import collections
import math
import re
from typing import NamedTuple


class _Instruction(NamedTuple):
  """One line of a module's text."""

  shape: str  # of the result, layout and memory with it
  op: str
  operands: list[str]
  line: str

  def calls(self, role: str) -> list[str]:
    return re.findall(rf"(?:{role})=%([\w.-]+)", self.line)

  def first(self, pattern: str) -> str:
    return (re.findall(pattern, self.line) or [""])[0]


_Computations = dict[str, dict[str, _Instruction]]

# What fetches an array into memory on the chip, slice by slice, or names it: not a copy.
_SAME = {"bitcast", "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done"}
_SAME |= {"async-start", "async-done", "custom-call"}


def weight_copies(hlo: str) -> list[str]:
  """Copies of whole kernels or embedding tables that an optimised program makes, and of which.

  A copy is an instruction, in a loop or outside, that reads such a matrix and makes something as
  large which is no product: another layout or dtype, or several matrices put together. Fetching a
  matrix into memory on the chip as it is does not count.
  """
  computations, entry = _parse(hlo)
  callers = {  # of the body of a loop: the computation and the instruction that run it
    body: (computation, name)
    for computation, instructions in computations.items()
    for name, instruction in instructions.items()
    for body in instruction.calls("body|condition")
  }

  def weight(computation: str, name: str, path: tuple[int, ...] = ()) -> _Instruction | None:
    """The entry's parameter that this is, or in a tuple what is at `path`, if that is a matrix."""
    instruction = computations[computation].get(name)
    if instruction is None:
      return None
    if instruction.op == "parameter":
      if computation == entry:
        return instruction if instruction.first(r"'(kernel|embedding)\W") else None
      return weight(*callers[computation], path)
    if instruction.op == "get-tuple-element":
      index = int(instruction.first(r"index=(\d+)"))
      return weight(computation, instruction.operands[0], (index, *path))
    if instruction.op == "tuple":
      return weight(computation, instruction.operands[path[0]], path[1:])
    if instruction.op in _SAME | {"while"} and instruction.operands:
      return weight(computation, instruction.operands[0], path)
    return None

  copies = []
  for computation in (entry, *callers):
    for name, instruction in computations[computation].items():
      if instruction.op in _SAME | {"tuple", "get-tuple-element", "while"}:
        continue
      for operand in instruction.operands:
        source = weight(computation, operand)
        if (
          source
          and _size(instruction.shape) >= _size(source.shape)
          and not _multiplies(computations, instruction)
        ):
          of = source.first('op_name="(.*?)"').replace("\\", "")
          copies.append(f"{name} ({instruction.shape.split('{')[0]}) of {of}")
  return copies


def _parse(hlo: str) -> tuple[_Computations, str]:
  """Instructions by name, by computation; and which computation is the entry."""
  computations: _Computations = collections.defaultdict(dict)
  entry = computation = ""
  for line in hlo.splitlines():
    if head := re.match(r"(ENTRY )?%(\S+) .*{$", line):
      computation = head[2]
      entry = computation if head[1] else entry
    elif found := re.match(r"\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z-]*)\((.*?)\)", line):
      name, shape, op, operands = found.groups()
      operands = re.findall(r"%([\w.-]+)", operands)
      computations[computation][name] = _Instruction(shape, op, operands, line)
  return computations, entry


def _multiplies(computations: _Computations, instruction: _Instruction) -> bool:
  """Whether it is a product, possibly one written as a sum, or has one fused into it."""
  inside = (i for name in instruction.calls("calls") for i in computations[name].values())
  product = instruction.op in ("convolution", "dot", "reduce")
  return product or any(_multiplies(computations, i) for i in inside)


def _size(shape: str) -> int:
  """Elements of an array, or of the largest one in a tuple."""
  dimensions = re.findall(r"\w\[([\d,]*)\]", shape)
  return max((math.prod(int(n) for n in one.split(",") if n) for one in dimensions), default=0)
