"""One file per verb: open, transform, save or report. The command line and the library call the same function.

A verb is a function of the name of its command. Those that write take the options of `_save.Save`, and return
`Written`.
"""
