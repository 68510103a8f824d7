"""How guesses are judged, one file a rule: its formula, its source, and whether it is exact."""
