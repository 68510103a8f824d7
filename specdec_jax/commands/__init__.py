"""Commands that gin files run: download, translate, decode, check exactness, measure, and train."""
