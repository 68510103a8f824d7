"""Measurements for the paper's tables and for studies of drafts, trees, beams and gamma."""
