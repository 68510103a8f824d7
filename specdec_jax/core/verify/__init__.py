"""Verifiers, each in a module that states its formulas, its source and whether it is exact."""
