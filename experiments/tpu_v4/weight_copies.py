"""Find copies of weights in the optimized HLO of a compiled program."""

from experiments.tpu_v4.hlo import Computations, Instruction, parse, size

# Operations that name an array, or move it to on-chip memory slice by slice. They are not copies.
_ALIASES = {"bitcast", "opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done"}
_ALIASES |= {"async-start", "async-done", "custom-call"}

_MATMULS = {"convolution", "dot", "reduce"}  # a matmul with one row may be written as a sum

# The smallest fraction of a matrix that counts as a copied slice: the shard of one of 64 chips.
_MIN_SLICE = 1 / 64


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
