"""Parameters on disk -> our parameter tree: one reader a format, and `load` for any of them."""
