"""How fast, how often right, at what cost: measured, and gamma chosen by it."""
