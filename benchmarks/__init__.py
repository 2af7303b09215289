"""The claims of the README about speed and memory, measured again by `make bench`."""
