"""Parse the optimized HLO text of a compiled program; count instructions and weight copies."""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

# Operations that name an array, or move it to on-chip memory slice by slice. They are not copies.
_ALIASES = {"bitcast", "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done"}

_ALIASES |= {"async-start", "async-done", "custom-call"}

_MATMULS = {"convolution", "dot", "reduce"}  # a matmul with one row may be written as a sum

# The smallest fraction of a matrix that counts as a copied slice: the shard of one of 64 chips.
_MIN_SLICE = 1 / 64

_COLLECTIVES = re.compile(
  "(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?"
)
# Attributes that name the computations which an instruction runs.
_LOOPS = "body|condition|true_computation|false_computation|branch_computations"
_ROLES = f"{_LOOPS}|calls|to_apply|called_computations"


class Instruction(NamedTuple):
  """Instruction of an HLO module, which is one line of its text.

  Attributes:
    shape: shape of the result, with its layout and memory space.
    op: name of the operation.
    operands: names of the operands, which are instructions of the same computation.
    line: the whole line.
  """

  shape: str
  op: str
  operands: list[str]
  line: str

  def calls(self, role: str) -> list[str]:
    """Return the computation names in the attributes that match `role`, as in 'body|condition'."""
    attributes = re.findall(rf"\b(?:{role})=({{[^}}]*}}|%[\w.-]+)", self.line)
    return [name for names in attributes for name in re.findall(r"%([\w.-]+)", names)]

  def first(self, pattern: str) -> str:
    """Return the first match of the pattern's group in the line, or an empty string."""
    return (re.findall(pattern, self.line) or [""])[0]


Computations = dict[str, dict[str, Instruction]]  # computation -> name -> instruction


def parse(hlo: str) -> tuple[Computations, str]:
  """Return the computations of a module and the name of its entry computation."""
  computations: Computations = collections.defaultdict(dict)
  entry = computation = ""
  for line in hlo.splitlines():
    if header := re.match(r"(ENTRY )?%(\S+) .*{$", line):
      computation = header[2]
      entry = computation if header[1] else entry
    elif match := re.match(r"\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z-]*)\((.*?)\)", line):
      name, shape, op, operands = match.groups()
      operands = re.findall(r"%([\w.-]+)", operands)
      computations[computation][name] = Instruction(shape, op, operands, line)
  return computations, entry


def executed_collectives(hlo: str) -> int:
  """Return the number of collective operations between chips in one run of a program.

  Collective instructions in a loop count once per iteration. A loop whose trip count is not known
  before it runs, such as a decoding loop, counts as one iteration, and all branches of a
  conditional count.
  """
  return _executed(hlo, lambda instruction: bool(_COLLECTIVES.fullmatch(instruction.op)), _ROLES)


def estimated_cycles(hlo: str) -> int:
  """Return the cycles of one run according to the compiler's cost model.

  Instructions without an estimate count as 0. Loops and conditionals count as in
  `executed_collectives`.
  """
  return _executed(
    hlo, lambda instruction: int(instruction.first(r'"estimated_cycles":"(\d+)"') or 0), _LOOPS
  )


def _executed(hlo: str, count: Callable[[Instruction], int], roles: str) -> int:
  """Sum `count` over all instructions of a program, weighted by how often each one runs.

  The sum includes the computations that instructions name in the attributes `roles`.
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
  """Return the number of convolutions, which include the matmuls of a TPU's matrix unit."""
  computations, _ = parse(hlo)
  return sum(
    instruction.op == "convolution"
    for instructions in computations.values()
    for instruction in instructions.values()
  )


def matrix_converts(hlo: str) -> int:
  """Return the number of conversions of bfloat16 matrices of 2^20 elements or more to float32.

  The compiler may write a matmul as a sum of products for the vector unit. It then converts the
  weights, and may also convert the activations after broadcasting them to the shape of the weights.
  """
  computations, _ = parse(hlo)
  return sum(
    instruction.op == "convert"
    and instruction.shape.startswith("f32[")
    and size(instruction.shape) >= 1 << 20
    and all(instructions[name].shape.startswith("bf16[") for name in instruction.operands)
    for instructions in computations.values()
    for instruction in instructions.values()
  )


def size(shape: str) -> int:
  """Return the number of elements of an array, or of the largest array in a tuple."""
  arrays = re.findall(r"\w\[([\d,]*)\]", shape)
  return max((math.prod(int(n) for n in array.split(",") if n) for array in arrays), default=0)


def trip_count(computations: Computations, computation: str, instruction: Instruction) -> int:
  """Return the number of iterations of a loop that counts up to a constant.

  `lax.scan` and `lax.fori_loop` with constant bounds compile to such loops. The result is 1 for all
  other loops and for instructions that are not loops.
  """
  if instruction.op != "while":
    return 1
  if known := instruction.first(r'known_trip_count":{"n":"(\d+)"'):  # stated by the CPU compiler
    return int(known)
  (condition,) = instruction.calls("condition")
  instructions = computations[condition]
  root = next(i for i in instructions.values() if i.line.lstrip().startswith("ROOT"))
  if root.op != "compare" or "direction=LT" not in root.line:
    return 1
  counter, limit = (instructions[name] for name in root.operands)
  initial_state = computations[computation][instruction.operands[0]]
  if counter.op != "get-tuple-element" or initial_state.op != "tuple":
    return 1
  start = computations[computation][initial_state.operands[int(counter.first(r"index=(\d+)"))]]
  while start.op in ("copy", "bitcast"):
    start = computations[computation][start.operands[0]]
  if not start.op == limit.op == "constant":
    return 1
  first, last = (int(i.first(r" constant\((-?\d+)\)")) for i in (start, limit))
  return last - first


def weight_copies(hlo: str) -> list[str]:
  """Return a description of each copy that a program makes of a kernel or an embedding table.

  A copy is an instruction, inside or outside a loop, that reads such a matrix, has a result of at
  least its size, and is not a matmul: it changes the layout or the dtype, or concatenates several
  matrices. A slice of at least 1/64 of a matrix is a copy too, unless it is a lookup of rows.
  Moving a matrix to on-chip memory unchanged is not a copy.
  """
  computations, entry = parse(hlo)
  callers = {  # loop body or condition -> the computation and the instruction that run it
    body: (computation, name)
    for computation, instructions in computations.items()
    for name, instruction in instructions.items()
    for body in instruction.calls("body|condition")
  }

  def weight(computation: str, name: str, path: tuple[int, ...] = ()) -> Instruction | None:
    """Return the parameter that a value refers to if it is a weight matrix, else None.

    `path` selects an element of the value if it is a (nested) tuple.
    """
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
    if instruction.op in _ALIASES | {"while"} and instruction.operands:
      return weight(computation, instruction.operands[0], path)
    return None

  copies = []
  for computation in (entry, *callers):
    for name, instruction in computations[computation].items():
      if instruction.op in _ALIASES | {"tuple", "get-tuple-element", "while"}:
        continue
      for operand in instruction.operands:
        source = weight(computation, operand)
        if source is None or _contains(computations, instruction, _MATMULS):
          continue
        share = size(instruction.shape) / size(source.shape)
        is_lookup = _contains(computations, instruction, {"gather"})
        if share >= 1 or (share >= _MIN_SLICE and not is_lookup):
          parameter = source.first('op_name="(.*?)"').replace("\\", "")
          copies.append(f"{name} ({instruction.shape.split('{')[0]}) of {parameter}")
  return copies


def _contains(computations: Computations, instruction: Instruction, ops: set[str]) -> bool:
  """Return True if an instruction is one of the given operations or is fused with one of them."""
  fused = (i for name in instruction.calls("calls") for i in computations[name].values())
  return instruction.op in ops or any(_contains(computations, i, ops) for i in fused)
