"""Commands that gin files run: translate, decode, check exactness, measure a speedup, and train."""
