"""How guesses are judged, one file a verifier: its formula, its source, and whether it is exact."""
