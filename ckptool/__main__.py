"""`python -m ckptool`: the program, where its folder is not on the PATH."""

from ckptool.cli import main

main()
