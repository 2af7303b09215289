"""Coverage-guided fuzzing of the readers: `python -m tests.fuzz`. Needs atheris (the extra `fuzz`)."""
