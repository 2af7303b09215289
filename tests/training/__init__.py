"""The training harness."""
