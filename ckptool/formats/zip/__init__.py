"""Zip archives: the directory that is believed, the records that are read, the archives that are written."""
