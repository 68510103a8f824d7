"""Copies of weights in a program that XLA has optimised."""

from specdec_jax.tpu.hlo import Computations, Instruction, parse, size

# What fetches an array into memory on the chip, slice by slice, or names it: not a copy.
_SAME = {"bitcast", "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done"}
_SAME |= {"async-start", "async-done", "custom-call"}

_PRODUCTS = {"convolution", "dot", "reduce"}  # of one row it may be written as a sum

# The smallest share of a matrix that counts as a slice of it: one of the pieces into which 64 chips
# would cut it.
_SLICE = 1 / 64


def weight_copies(hlo: str) -> list[str]:
  """Copies of kernels or embedding tables that an optimised program makes, and of which.

  A copy is an instruction, in a loop or outside, that reads such a matrix and makes something as
  large which is no product: another layout or dtype, or several matrices put together. A large
  slice of a matrix (`_SLICE`) is a copy too, unless it is rows that are looked up. Fetching a
  matrix into memory on the chip as it is does not count.
  """
  computations, entry = parse(hlo)
  callers = {  # of the body of a loop: the computation and the instruction that run it
    body: (computation, name)
    for computation, instructions in computations.items()
    for name, instruction in instructions.items()
    for body in instruction.calls("body|condition")
  }

  def weight(computation: str, name: str, path: tuple[int, ...] = ()) -> Instruction | None:
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
        if source is None or _has(computations, instruction, _PRODUCTS):
          continue
        share = size(instruction.shape) / size(source.shape)
        if share >= 1 or (share >= _SLICE and not _has(computations, instruction, {"gather"})):
          of = source.first('op_name="(.*?)"').replace("\\", "")
          copies.append(f"{name} ({instruction.shape.split('{')[0]}) of {of}")
  return copies


def _has(computations: Computations, instruction: Instruction, ops: set[str]) -> bool:
  """Return True if the instruction is one of these operations or has one fused into it."""
  inside = (i for name in instruction.calls("calls") for i in computations[name].values())
  return instruction.op in ops or any(_has(computations, i, ops) for i in inside)
