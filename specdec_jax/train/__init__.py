"""Losses, batches and the training loop, for models and learned drafts."""
