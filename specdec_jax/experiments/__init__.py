"""Runs that a gin file names: translate, measure, train. They write text and records."""
