"""Functions that a gin file can run: translate, measure, train. They write text and records."""
