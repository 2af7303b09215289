"""Zip archives: the directory, the records, what is left of a damaged one."""
