"""Programs compiled for TPUs, with none there, and what they read."""
