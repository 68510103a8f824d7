"""Records and rounds -> what a person reads."""
