"""The checker: what decoding did, beside what the target would have done."""
