"""Parameters on disk -> our parameter tree."""
