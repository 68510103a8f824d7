"""Methods of papers that are slower here than those in `drafts` and `core.verify`, one file each.

docs/methods.md names their sources and measurements. Each is written as a user would write one: on
the public contract of drafts, verifiers and heads, or on the arguments of
`commands.train.train_draft`.
"""
