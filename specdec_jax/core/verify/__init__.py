"""Methods that accept or reject draft tokens, one file each: formula, source, and exactness."""
