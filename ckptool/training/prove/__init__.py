"""The proof that a run killed anywhere ends with the same bytes, and the machine that kills it at a chosen point."""
