"""Commands of a user, which gin files run: translate, decode, check, measure a speedup, train."""
