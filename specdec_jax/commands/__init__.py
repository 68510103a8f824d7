"""Commands that gin files run: translate, decode, check exactness, measure, and train."""
