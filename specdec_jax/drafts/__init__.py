"""Approximation models M_q (Section 3.6), one file each."""
